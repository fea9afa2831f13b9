"""Sockets that carry steps: ipc on one node, tcp with CURVE between nodes. No waiter spins.

A shard opens its socket and tells the address through an actor call; the Router connects. Keys
travel the same way, so a socket on the network answers only to the Router that it was told of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
from zmq.auth.thread import ThreadAuthenticator

Transport = Literal["ipc", "tcp"]


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
    """The Router's end of one shard's socket."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, keys: CurveKeys
    ) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        if endpoint.public_key is not None:
            self.socket.curve_serverkey = endpoint.public_key
            self.socket.curve_publickey = keys.public
            self.socket.curve_secretkey = keys.secret
        self.socket.connect(endpoint.address)
