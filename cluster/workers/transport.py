"""Sockets that carry steps: Unix ones on one node, tcp with CURVE between nodes. No waiter spins.

A shard opens its socket and tells the address through an actor call; the Router connects. Keys
travel the same way, so a socket on the network answers only to the Router that it was told of.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from cluster.workers.unix_socket import UnixListener, UnixSocket

Transport = Literal["ipc", "tcp"]

_IPC = "ipc://"
_LINGER_MS = 1000
"""How long a shard's last answer over tcp may take to leave, once its socket is closed."""
_SIGN_EVERY_MS = 1500
_SILENCE_LIMIT_MS = 5000
"""Under a loss of 30 % of all packets TCP delivers again within this time, nearly always."""


@dataclass(frozen=True)
class CurveKeys:
    """A key pair of one end of a connection."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """A new pair."""
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class Endpoint:
    """Where a shard listens. `public_key` is set for tcp only."""

    address: str
    public_key: bytes | None = None


class StepSocket(Protocol):
    """One end of a connection with one peer: messages of several frames, in order."""

    @property
    def pollable(self) -> zmq.Socket[bytes] | int:
        """What zmq.Poller takes, and gives back when a message can be received."""

    @property
    def is_lost(self) -> bool:
        """Whether the network between the ends is known to have failed. From any thread."""

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends a message. Raises OSError where it is known that nobody will read it."""

    def send_last(self, frames: Sequence[bytes]) -> None:
        """Sends a message that nothing follows, unless nobody can be told now. Does not wait."""

    def receive(self) -> list[bytes]:
        """Waits for the next message. Raises OSError where it is known that none comes whole."""

    def close(self) -> None:
        """Closes this end."""


class Listener:
    """A shard's end, to be opened before the Router knows of it."""

    def __init__(
        self, transport: Transport, host: str, peer_public_key: bytes, ipc_path: Path
    ) -> None:
        """Opens a Unix socket at `ipc_path`, or a tcp one on `host` for that key alone.

        Whoever may enter the directory of `ipc_path` may connect.
        """
        self._local: UnixListener | None = None
        self._remote: _CurveServer | None = None
        if transport == "ipc":
            self._local = UnixListener(ipc_path)
            self.endpoint = Endpoint(f"{_IPC}{ipc_path}")
        else:
            self._remote = _CurveServer(host, peer_public_key)
            self.endpoint = self._remote.endpoint
        self._socket: StepSocket | None = None

    def accept(self) -> StepSocket:
        """This end of the connection. A Unix socket waits here for the other one."""
        if self._local is not None:
            self._socket = self._local.accept()
        else:
            assert self._remote is not None
            self._socket = _ZmqSocket(self._remote.socket)
        return self._socket

    def close(self) -> None:
        """Closes the socket."""
        if self._socket is not None:
            self._socket.close()
        if self._local is not None:
            self._local.close()
        if self._remote is not None:
            self._remote.close()


class _CurveServer:
    """A pyzmq socket on the network that lets one client key in."""

    def __init__(self, host: str, peer_public_key: bytes) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.linger = _LINGER_MS
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=_OnlyPeer(peer_public_key)
        )
        keys = CurveKeys.generate()
        self.socket.curve_server = True
        self.socket.curve_secretkey = keys.secret
        self.socket.curve_publickey = keys.public
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = Endpoint(f"tcp://{host}:{port}", keys.public)

    def close(self) -> None:
        """Sends what is left to send first."""
        self.socket.close()
        self._authenticator.stop()
        self._context.term()


class _OnlyPeer:
    """Lets one client key in; pyzmq asks it at each handshake."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        """`key` is in Z85, as all keys here."""
        return key == self._public_key


class _ZmqSocket:
    """One end of a pyzmq pair. It never knows that nobody reads: it keeps what it is to send."""

    def __init__(self, pair: zmq.Socket[bytes]) -> None:
        self._socket = pair

    @property
    def pollable(self) -> zmq.Socket[bytes]:
        """See StepSocket."""
        return self._socket

    @property
    def is_lost(self) -> bool:
        """See StepSocket."""
        return False

    def send(self, frames: Sequence[bytes]) -> None:
        """See StepSocket."""
        self._socket.send_multipart(frames, copy=False)

    def send_last(self, frames: Sequence[bytes]) -> None:
        """See StepSocket."""
        with suppress(zmq.Again):
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)

    def receive(self) -> list[bytes]:
        """See StepSocket."""
        return self._socket.recv_multipart()

    def close(self) -> None:
        """See StepSocket."""
        self._socket.close()


class _WatchedSocket(_ZmqSocket):
    """The Router's end over tcp, to be made before it is connected.

    Both ends show each other signs of life, from threads of their own: so a network that fails is
    noticed within _SIGN_EVERY_MS + _SILENCE_LIMIT_MS, whether a step runs or not, and a shard that
    computes for long is not taken for lost.
    """

    def __init__(self, pair: zmq.Socket[bytes]) -> None:
        super().__init__(pair)
        pair.heartbeat_ivl = _SIGN_EVERY_MS
        pair.heartbeat_timeout = _SILENCE_LIMIT_MS
        self._monitor = pair.get_monitor_socket(zmq.Event.DISCONNECTED)
        self._lock = threading.Lock()  # of the monitor, which any thread may ask
        self._has_broken = self._is_closed = False

    @property
    def is_lost(self) -> bool:
        """See StepSocket."""
        with self._lock:
            if not self._is_closed and self._monitor.poll(0):
                self._has_broken = True
            return self._has_broken

    def close(self) -> None:
        """See StepSocket."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._socket.disable_monitor()
                self._monitor.close()
        super().close()


def connect(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: Endpoint,
    keys: CurveKeys,
    timeout_s: float,
) -> StepSocket:
    """The Router's end of one shard's socket. Raises OSError where no shard listens on this node.

    timeout_s: how long a shard of this node may take, or give, nothing of a message under way.
    """
    if endpoint.address.startswith(_IPC):
        return UnixSocket.connect(Path(endpoint.address.removeprefix(_IPC)), timeout_s)
    pair = context.socket(zmq.PAIR)
    pair.linger = 0
    if endpoint.public_key is not None:
        pair.curve_serverkey = endpoint.public_key
        pair.curve_publickey = keys.public
        pair.curve_secretkey = keys.secret
    watched = _WatchedSocket(pair)
    pair.connect(endpoint.address)
    return watched
