"""Sockets for step messages: Unix sockets on one node, TCP with CURVE between nodes.

A worker opens its socket and returns the address through an actor call; the Router connects. Keys
are exchanged the same way, so a TCP socket accepts only its own Router. Waiting never spins.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from cluster.workers.transport.unix_socket import PeerGoneError, UnixListener, UnixSocket

Transport = Literal["ipc", "tcp"]

_IPC = "ipc://"
_LINGER_MS = 1000
"""The limit to deliver a worker's last answer over TCP once its socket is closed."""
_HEARTBEAT_INTERVAL_MS = 1500
_HEARTBEAT_TIMEOUT_MS = 5000
"""With 30 % packet loss, TCP nearly always retransmits successfully within this time."""
_CURVE_BYTES = 33
"""Added to a message by CURVE: its name, a nonce, an authenticator and flags."""


@dataclass(frozen=True)
class CurveKeys:
    """A key pair of one end of a connection."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """Return a new pair."""
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class Endpoint:
    """The address of a worker's socket. `public_key` is set for TCP only."""

    address: str
    public_key: bytes | None = None


class StepSocket(Protocol):
    """One end of a connection with one peer: multi-frame messages, in order."""

    @property
    def pollable(self) -> zmq.Socket[bytes] | int:
        """The object to register with zmq.Poller, which returns it when a message is readable."""

    def poll_lost(self) -> bool:
        """Return whether the network between the ends is known to have failed. From any thread."""

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message. Raises OSError if the peer is known not to read it."""

    def send_last(self, frames: Sequence[bytes]) -> None:
        """Send the last message, or drop it if it cannot be sent immediately."""

    def receive(self) -> list[bytes]:
        """Wait for the next message. Raises OSError if none can arrive completely."""

    def close(self) -> None:
        """Close this end."""


def has_message(socket: StepSocket) -> bool:
    """Return whether a message has arrived, or the peer has gone. Does not wait."""
    poller = zmq.Poller()
    poller.register(socket.pollable, zmq.POLLIN)
    return bool(poller.poll(0))


class Listener:
    """A worker's end, opened before the Router connects."""

    def __init__(
        self,
        transport: Transport,
        host: str,
        peer_public_key: bytes,
        ipc_path: Path,
        *,
        polls_lost: bool = False,
        max_message_bytes: int | None = None,
    ) -> None:
        """Open a Unix socket at `ipc_path`, or a TCP socket on `host` for that key only.

        Any process that can access the directory of `ipc_path` can connect. polls_lost: whether
        `poll_lost` is called regularly; a TCP socket keeps events for it until then.
        max_message_bytes: a TCP connection over which a larger message arrives is closed.
        """
        self._server: UnixListener | _CurveServer
        if transport == "ipc":
            self._server = UnixListener(ipc_path)
            self.endpoint = Endpoint(f"{_IPC}{ipc_path}")
        else:
            self._server = _CurveServer(
                host, peer_public_key, polls_lost=polls_lost, max_message_bytes=max_message_bytes
            )
            self.endpoint = self._server.endpoint

    @property
    def pollable(self) -> zmq.Socket[bytes] | int:
        """The object to register with zmq.Poller, which returns it when `accept` does not wait."""
        return self._server.pollable

    def accept(self, timeout_s: float | None = None) -> StepSocket:
        """Return this end of the connection. A Unix socket waits here for its peer.

        timeout_s: the limit for a peer on this node to read or write the next part of a message.
        """
        return self._server.accept(timeout_s)

    def poll_lost(self) -> bool:
        """Return whether the Router is known to be lost, before or after `accept`."""
        return self._server.poll_lost()

    def close(self) -> None:
        """Close the socket."""
        self._server.close()


class _CurveServer:
    """A TCP socket that authenticates one client key."""

    def __init__(
        self,
        host: str,
        peer_public_key: bytes,
        *,
        polls_lost: bool,
        max_message_bytes: int | None,
    ) -> None:
        self._context = zmq.Context()
        self._pair = self._context.socket(zmq.PAIR)
        self._pair.linger = _LINGER_MS
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        # Called at each handshake; `key` is in Z85, as all keys here.
        only_peer = SimpleNamespace(callback=lambda domain, key: key == peer_public_key)
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=only_peer)
        monitor = _Monitor(self._pair, accepts=True) if polls_lost else None
        self._end = _ZmqSocket(self._pair, monitor, max_message_bytes)
        keys = CurveKeys.generate()
        self._pair.curve_server = True
        self._pair.curve_secretkey = keys.secret
        self._pair.curve_publickey = keys.public
        self._pair.ipv6 = ":" in host
        place = f"tcp://[{host}]" if self._pair.ipv6 else f"tcp://{host}"
        self.endpoint = Endpoint(f"{place}:{self._pair.bind_to_random_port(place)}", keys.public)

    @property
    def pollable(self) -> zmq.Socket[bytes]:
        return self._pair

    def accept(self, timeout_s: float | None = None) -> StepSocket:
        del timeout_s  # sending never waits
        return self._end

    def poll_lost(self) -> bool:
        return self._end.poll_lost()

    def close(self) -> None:
        """Close the socket after pending messages are sent, within _LINGER_MS."""
        self._end.close()
        self._authenticator.stop()
        self._context.term()


class _Monitor:
    """Monitor of a pyzmq pair's connections, made before it is bound or connected.

    Any thread may poll it. Events wait in memory: a full pipe would block the pair's I/O thread,
    and any host that can reach the port can cause events.
    """

    def __init__(self, pair: zmq.Socket[bytes], *, accepts: bool = False) -> None:
        """Monitor a pair. accepts: whether others may connect, and be refused for their key."""
        self._pair = pair
        self._accepts = accepts
        self._open: set[int] = set()  # accepted connections, by file descriptor
        self._peers: set[int] | None = None  # those of them that may be the peer's
        address = f"inproc://monitor-{pair.FD}"
        pair.monitor(
            address, zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        )
        self._events = pair.context.socket(zmq.PAIR)
        self._events.rcvhwm = 0  # unlimited; get_monitor_socket() keeps the default
        self._events.connect(address)
        self._lock = threading.Lock()
        self._is_disconnected = self._is_closed = False

    def poll_lost(self) -> bool:
        """Process all events; return whether the peer was connected and is not any more."""
        with self._lock:
            while not self._is_closed and self._events.poll(0):
                self._follow(recv_monitor_message(self._events))
            return self._is_disconnected

    def _follow(self, message: Mapping[str, Any]) -> None:
        """Follow the connections. The event of a handshake does not name its connection."""
        event, descriptor = message["event"], message["value"]
        if event == zmq.Event.ACCEPTED:
            self._open.add(descriptor)
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._peers = set(self._open)
        else:
            self._open.discard(descriptor)
            if self._peers is not None:
                self._peers.discard(descriptor)
            self._is_disconnected |= not self._accepts or self._peers == set()

    def close(self) -> None:
        """Stop monitoring, before the pair is closed."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._pair.disable_monitor()
                self._events.close()


class _ZmqSocket:
    """One end of a pyzmq pair, made before it is bound or connected. Sending never waits.

    Both ends exchange heartbeats from background threads, so an end with a monitor detects a failed
    network within _HEARTBEAT_INTERVAL_MS + _HEARTBEAT_TIMEOUT_MS, during a step or not, and does
    not mistake a worker that computes for a long time for a lost one. It detects a peer that has
    ended at once, but as a worker only after all connections have ended that were open at the
    peer's handshake, also those of strangers.
    """

    def __init__(
        self, pair: zmq.Socket[bytes], monitor: _Monitor | None, max_message_bytes: int | None
    ) -> None:
        """Take a pair with its monitor; `poll_lost` is always false without one."""
        self._socket = pair
        self._monitor = monitor
        pair.heartbeat_ivl = _HEARTBEAT_INTERVAL_MS
        pair.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        if max_message_bytes is not None:
            pair.maxmsgsize = max_message_bytes + _CURVE_BYTES

    @property
    def pollable(self) -> zmq.Socket[bytes]:
        return self._socket

    def poll_lost(self) -> bool:
        return self._monitor is not None and self._monitor.poll_lost()

    def send(self, frames: Sequence[bytes]) -> None:
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again as error:  # a bound socket without a connection would wait for another one
            raise PeerGoneError("the peer of a step socket cannot be reached") from error

    def send_last(self, frames: Sequence[bytes]) -> None:
        with suppress(PeerGoneError):
            self.send(frames)

    def receive(self) -> list[bytes]:
        return self._socket.recv_multipart()

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close()


def connect(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: Endpoint,
    keys: CurveKeys,
    timeout_s: float,
    *,
    max_message_bytes: int | None = None,
) -> StepSocket:
    """Return the Router's end of a worker's socket.

    timeout_s: the limit for a worker on this node to read or write the next part of a message.
    max_message_bytes: a TCP connection over which a larger message arrives is closed. Raises
    OSError if no worker listens on this node.
    """
    if endpoint.address.startswith(_IPC):
        return UnixSocket.connect(Path(endpoint.address.removeprefix(_IPC)), timeout_s)
    pair = context.socket(zmq.PAIR)
    pair.linger = 0
    if endpoint.public_key is not None:
        pair.curve_serverkey = endpoint.public_key
        pair.curve_publickey = keys.public
        pair.curve_secretkey = keys.secret
    pair.ipv6 = "[" in endpoint.address
    monitored = _ZmqSocket(pair, _Monitor(pair), max_message_bytes)
    pair.connect(endpoint.address)
    return monitored
