"""Sockets that carry steps: ipc on one node, tcp with CURVE between nodes. No waiter spins.

A shard opens its socket and tells the address through an actor call; the Router connects. Keys
travel the same way, so a socket on the network answers only to the Router that it was told of.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
from zmq.auth.thread import ThreadAuthenticator

Transport = Literal["ipc", "tcp"]

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


class Listener:
    """A shard's end: one peer, messages in order."""

    def __init__(
        self, transport: Transport, host: str, peer_public_key: bytes, ipc_path: Path
    ) -> None:
        """Opens an ipc socket at `ipc_path`, or a tcp one on `host` for that key alone.

        Whoever may enter the directory of `ipc_path` may connect.
        """
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.linger = 1000
        self._authenticator: ThreadAuthenticator | None = None
        if transport == "ipc":
            self.endpoint = Endpoint(f"ipc://{ipc_path}")
            self.socket.bind(self.endpoint.address)
        else:
            self.endpoint = self._bind_tcp(host, peer_public_key)

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _bind_tcp(self, host: str, peer_public_key: bytes) -> Endpoint:
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
        return Endpoint(f"tcp://{host}:{port}", keys.public)


class _OnlyPeer:
    """Lets one client key in; pyzmq asks it at each handshake."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        """`key` is in Z85, as all keys here."""
        return key == self._public_key


class Connection:
    """The Router's end of one shard's socket.

    Over tcp both ends show each other signs of life, from threads of their own: so a network that
    fails is noticed within _SIGN_EVERY_MS + _SILENCE_LIMIT_MS, whether a step runs or not, and a
    shard that computes for long is not taken for lost.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, keys: CurveKeys
    ) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        self._lock = threading.Lock()  # of the monitor, which any thread may ask
        self._monitor: zmq.Socket[bytes] | None = None
        self._is_lost = False
        if endpoint.public_key is not None:
            self.socket.heartbeat_ivl = _SIGN_EVERY_MS
            self.socket.heartbeat_timeout = _SILENCE_LIMIT_MS
            self._monitor = self.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
            self.socket.curve_serverkey = endpoint.public_key
            self.socket.curve_publickey = keys.public
            self.socket.curve_secretkey = keys.secret
        self.socket.connect(endpoint.address)

    @property
    def is_lost(self) -> bool:
        """Whether the connection over the network has broken, once. From any thread."""
        with self._lock:
            if self._monitor is not None and self._monitor.poll(0):
                self._is_lost = True
            return self._is_lost

    def close(self) -> None:
        """Closes the socket."""
        with self._lock:
            if self._monitor is not None:
                self.socket.disable_monitor()
                self._monitor.close()
                self._monitor = None
        self.socket.close()
