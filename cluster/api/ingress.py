"""The embedded ingress: gRPC and HTTP servers of our own in the Router's process.

Unlike Serve's gRPC it binds the configured host, loopback by default, supports TLS, and limits the
size of messages; and there is no proxy between a client and the step loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from cluster.api.base.authentication import AdminAccess
from cluster.api.base.certificate_files import grpc_credentials, http_context
from cluster.api.base.grpc_stop import stop_server
from cluster.api.grpc.intake import CHANNEL_OPTIONS, Intake
from cluster.api.grpc.rpc_access import SERVICE_NAMES, has_access
from cluster.api.grpc.servicers import (
    InferenceServicer,
    add_admin_service,
    add_inference_service,
)
from cluster.api.grpc.status import GenericServer
from cluster.api.http.connection import KEEP_ALIVE_S, BoundedConnection
from cluster.config.network import address_of, listening_socket
from cluster.config.serve_config import ServeConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE_S = 2.0
_PORT_ATTEMPTS = 20
_PORT_RETRY_S = 0.5
_MAX_OPEN_FILES = 65_536


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process belongs to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class IngressFailedError(Exception):
    """A server has ended before it was closed."""


class EmbeddedIngress:
    """Both servers. They listen while the model loads: alive, but not ready."""

    def __init__(
        self,
        app: ASGIApp,
        inference: InferenceServicer,
        admin: Any,
        access: AdminAccess,
        config: ServeConfig,
        *,
        shares_ports: bool = False,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """admin: servicer of AdminService. shares_ports: whether other processes listen as well.

        on_failure: called when the HTTP server ends before `close`.
        """
        self._inference, self._admin, self._on_failure = inference, admin, on_failure
        self._config = config
        self._health = health.aio.HealthServicer()
        is_permitted = partial(has_access, inference.keys, access)
        self._grpc = _new_grpc_server(config, is_permitted, shares_port=shares_ports)
        self._http = _HttpServer(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.http_port,
                http=BoundedConnection,
                ws="none",  # a WebSocket is refused as an HTTP request, by its path and method
                timeout_keep_alive=KEEP_ALIVE_S,
                lifespan="off",  # no application has one, and force_exit would not end it
                log_config=None,  # otherwise its loggers get separate handlers
                log_level=config.log_level,
                access_log=config.log_level in ("debug", "info"),  # uvicorn formats it in any case
                ssl_certfile=config.tls_cert_file,
                ssl_keyfile=config.tls_key_file,
                ssl_context_factory=_context_factory(config),
            )
        )
        self._http_task: asyncio.Task[None] | None = None
        self._failure: IngressFailedError | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def start(self, http_socket: socket.socket | None = None) -> None:
        """Open both ports. Raises RuntimeError or OSError if one is not available.

        http_socket: listens already; None to open it.
        """
        _raise_file_limit()
        add_inference_service(self._inference, self._grpc)
        add_admin_service(self._admin, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, GenericServer(self._grpc))
        reflection.enable_server_reflection(
            (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc
        )
        await self.set_ready(False)
        if http_socket is None:
            http_socket = await open_with_retries(self._open_http_socket)
        await open_with_retries(self._open_grpc_port)
        await self._grpc.start()
        self._http_task = asyncio.create_task(self._http.serve(sockets=[http_socket]))
        self._http_task.add_done_callback(self._on_http_end)

    def _on_http_end(self, task: asyncio.Task[None]) -> None:
        """Report at once that the HTTP server has ended, unless `close` has ended it."""
        if self._http.should_exit or task.cancelled():  # with the event loop
            return
        error = task.exception()
        reason = "without an error" if error is None else str(error) or type(error).__name__
        self._failure = IngressFailedError(f"the HTTP server has ended: {reason}")
        logger.critical("%s", self._failure, exc_info=error)
        self._reporting = asyncio.create_task(self.set_ready(False))
        self._on_failure()

    def check(self) -> None:
        """Raise IngressFailedError once the HTTP server has ended before `close`."""
        if self._failure is not None:
            raise self._failure

    def _open_http_socket(self) -> socket.socket:
        return listening_socket(self._config.host, self._config.http_port)

    def _open_grpc_port(self) -> None:
        config = self._config
        address = address_of(config.host, config.grpc_port)
        if config.tls_cert_file is None or config.tls_key_file is None:
            self._grpc.add_insecure_port(address)
            return
        credentials = grpc_credentials(config.tls_key_file, config.tls_cert_file)
        self._grpc.add_secure_port(address, credentials)

    async def set_ready(self, is_ready: bool) -> None:
        """Set the answer of grpc.health.v1, for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", *SERVICE_NAMES):
            is_served = is_ready and self._failure is None
            await self._health.set(name, status.SERVING if is_served else status.NOT_SERVING)

    async def close(self) -> None:
        """Report not ready, wait for running calls for _GRACE_S, and close both servers."""
        await self.set_ready(False)
        await asyncio.gather(stop_server(self._grpc, _GRACE_S), self._close_http())

    async def _close_http(self) -> None:
        if self._http_task is None or self._failure is not None:
            return
        self._http.should_exit = True
        await asyncio.wait([self._http_task], timeout=_GRACE_S)
        for connection in tuple(self._http.server_state.connections):
            connection.transport.abort()  # its client sends a body or reads a response slowly
        self._http.force_exit = True  # do not wait for handlers that ignore that
        await self._http_task


def _new_grpc_server(
    config: ServeConfig, is_permitted: Callable[[str, Any], bool], *, shares_port: bool
) -> grpc.aio.Server:
    return grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", config.grpc_max_message_mib * 2**20),
            ("grpc.max_send_message_length", config.grpc_max_message_mib * 2**20),
            ("grpc.so_reuseport", int(shares_port)),  # otherwise a port in use is an error
            *CHANNEL_OPTIONS,
        ],
        interceptors=[
            Intake(
                is_permitted,
                # More than the engine runs and queues, so that the engine refuses first.
                max_calls=2 * (config.max_num_seqs + config.max_queue_len) + 100,
                services=SERVICE_NAMES,
            )
        ],
    )


def _context_factory(config: ServeConfig) -> Callable[..., ssl.SSLContext] | None:
    """Return what makes uvicorn's TLS context; None without TLS."""
    key_file, certificate_file = config.tls_key_file, config.tls_cert_file
    if key_file is None or certificate_file is None:
        return None
    return lambda _config, new_context: http_context(key_file, certificate_file, new_context)


def _raise_file_limit() -> None:
    """Raise the soft limit on open files, of which each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def open_with_retries(open_port: Callable[[], T]) -> T:
    """Open a port, with retries: a replica that is being replaced may still hold it."""
    for _ in range(_PORT_ATTEMPTS - 1):
        try:
            return open_port()
        except (OSError, RuntimeError):
            await asyncio.sleep(_PORT_RETRY_S)
    return open_port()
