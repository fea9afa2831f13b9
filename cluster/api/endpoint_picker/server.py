"""The process of the endpoint picker: a gRPC server for the proxy, scrapes, and its metrics."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from ipaddress import ip_address
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import start_http_server

from cluster.api.base.byte_budget import ByteBudget
from cluster.api.base.certificate_files import grpc_credentials
from cluster.api.base.grpc_stop import stop_server
from cluster.api.endpoint_picker.certificates import self_signed
from cluster.api.endpoint_picker.exchange import Exchange
from cluster.api.endpoint_picker.external_scaler import ExternalScaler
from cluster.api.endpoint_picker.kubernetes import Cluster, PodWatcher
from cluster.api.endpoint_picker.metrics import registry_of
from cluster.api.endpoint_picker.pool import Pool
from cluster.api.endpoint_picker.pool_scaler import PoolScaler
from cluster.api.endpoint_picker.scraper import ScrapeConfig, Scraper
from cluster.config.network import address_of, check_certificate, listen_error
from cluster.config.objective import Objective
from protos.ext_proc import external_processor_pb2 as pb
from specdec.types.errors import InvalidValueError

logger = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"

_MAX_STREAMS = 2**12
_MAX_MESSAGE_BYTES = 2**24
"""Size of a whole body, where the proxy buffers it."""

_MAX_HELD_BYTES = 2**28
"""Size of the bodies of all streams; more are forwarded unread."""

_CHOICE_S = 10.0
"""From a request's headers to the choice, which waits no longer for the body."""

_ACCEPT_S = 3.0
"""From the end of readiness to that of new requests: gateways notice the former late."""

_PORT_FIELDS = ("port", "metrics_port", "health_port")
_GRACE_S = 2.0
_HEALTH_PERIOD_S = 0.1
_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S = 30.0, 10.0
"""A proxy that does not answer a ping has gone, and its requests end."""


@dataclass(frozen=True)
class PickerConfig:
    """Settings of the process.

    endpoints: addresses, or `pod_selector` with `pod_port` and `namespace` to follow pods.
    metrics_port: None to serve no metrics. health_port: of health checks without TLS; None for
    those of `port` alone. drain_timeout_s: for open responses at a stop. slo: as in
    `Objective.parse`; None to choose by tokens and count no replicas. The other fields are those of
    Pool and ScrapeConfig.
    """

    endpoints: tuple[str, ...] = ()
    pod_selector: str = ""
    pod_port: int = 8000
    namespace: str | None = None
    host: str = "127.0.0.1"
    port: int = 9002
    metrics_port: int | None = None
    health_port: int | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_self_signed: bool = False
    max_waiting: int | None = None
    num_fallbacks: int = 0
    drain_timeout_s: float = 20.0
    slo: str | None = None
    scrape: ScrapeConfig = field(default_factory=ScrapeConfig)

    def __post_init__(self) -> None:
        """Check the fields together. Raises InvalidValueError."""
        if bool(self.endpoints) == bool(self.pod_selector):
            limit = "given, or else a pod selector, and not both"
            raise InvalidValueError("endpoints", ",".join(self.endpoints), limit)
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            given = self.tls_cert_file or self.tls_key_file
            raise InvalidValueError("tls_cert_file", str(given), "given together with tls_key_file")
        if self.tls_self_signed and self.tls_cert_file is not None:
            limit = "left out with a self-signed certificate"
            raise InvalidValueError("tls_cert_file", str(self.tls_cert_file), limit)
        _ = self.objective, self.scrape.ssl_context  # raise
        check_certificate(self.tls_cert_file, self.tls_key_file)
        for each in self.endpoints:
            check_address(each)
        used: dict[int, str] = {}
        for name in _PORT_FIELDS:
            port = getattr(self, name)
            if port is not None and (other := used.setdefault(port, name)) != name:
                raise InvalidValueError(name, port, f"another port than {other}")

    @property
    def objective(self) -> Objective | None:
        """The objective of `slo`; None without one."""
        return None if self.slo is None else Objective.parse(self.slo)

    def check_ports(self) -> None:
        """Raise InvalidValueError for a port that is not free."""
        for name in _PORT_FIELDS:
            port = getattr(self, name)
            if port is not None and (error := listen_error(self.host, port)) is not None:
                limit = f"a free port of {self.host} ({error.strerror})"
                raise InvalidValueError(name, port, limit)


def check_address(address: str) -> None:
    """Raise InvalidValueError unless an address is ip:port: gateways do not resolve names."""
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        version = ip_address(host[1:-1] if is_bracketed else host).version
    except ValueError:
        version = None
    is_ip = version == (6 if is_bracketed else 4)
    if not (is_ip and port.isdecimal() and 0 < int(port) < 2**16):
        raise InvalidValueError("endpoints", address, "IP:PORT, with [] around an address of IPv6")


class ExternalProcessor:
    """The service that the proxy calls, with a stream for each HTTP request."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._budget = ByteBudget(_MAX_HELD_BYTES, uncounted_bytes=0)
        self._drains: set[asyncio.Future[None]] = set()  # of open streams
        self._ends_at_s = inf

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the service's only method."""
        process = grpc.stream_stream_rpc_method_handler(
            self.Process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    def drain(self, timeout_s: float) -> None:
        """End streams, each once its request is complete and an endpoint chosen.

        The proxy then completes the response alone. Those that return the parts of a response have
        `timeout_s` until it ends; after that the proxy breaks it off, since parts that are on their
        way would be missing from it.
        """
        self._ends_at_s = self._pool.clock() + timeout_s
        for each in self._drains:
            each.set_result(None)

    async def Process(
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: Any
    ) -> AsyncIterator[pb.ProcessingResponse]:
        """See the .proto."""
        exchange, clock = Exchange(self._pool, self._budget), self._pool.clock
        choice_due_s = clock() + _CHOICE_S
        read, drain = _next(request_iterator), asyncio.get_running_loop().create_future()
        self._drains.add(drain)
        if self._ends_at_s < inf:  # accepted just before the stop
            drain.set_result(None)
        try:
            while True:
                due_s = choice_due_s if exchange.is_waiting else self._ends_at_s
                answers = []  # a reference to a part would keep it in memory during the wait
                if await _comes(read, drain, due_s - clock()):
                    if read.result() is None:
                        return
                    answers += exchange.answer(read.result())
                    read = _next(request_iterator)
                if exchange.is_waiting and clock() >= choice_due_s:
                    answers += exchange.release()
                if is_late := clock() >= self._ends_at_s:
                    answers += exchange.break_off()
                while answers:
                    yield answers.pop(0)
                if is_late or (drain.done() and exchange.may_end and not exchange.returns_parts):
                    return
        finally:
            read.cancel()
            self._drains.discard(drain)
            exchange.close()


async def _comes(read: asyncio.Future[Any], drain: asyncio.Future[None], timeout_s: float) -> bool:
    """Wait for a message, or until `drain` is done; return whether the message has come."""
    await asyncio.wait(
        {read} if drain.done() else {read, drain},
        timeout=None if timeout_s == inf else max(0.0, timeout_s),
        return_when=asyncio.FIRST_COMPLETED,
    )
    return read.done()


def _next(messages: AsyncIterator[pb.ProcessingRequest]) -> asyncio.Future[Any]:
    """Return the next message of a stream as a future; None at its end."""
    return asyncio.ensure_future(anext(messages, None))


class PickerServer:
    """The gRPC server and the tasks beside it."""

    def __init__(self, config: PickerConfig) -> None:
        self._config = config
        self.pool = Pool(
            time.monotonic,
            max_waiting=config.max_waiting,
            num_fallbacks=config.num_fallbacks,
            objective=config.objective,
        )
        objective = config.objective
        self.scaler = None if objective is None else PoolScaler(self.pool, objective)
        self._processor = ExternalProcessor(self.pool)
        self._health = health.aio.HealthServicer()
        self._grpc = grpc.aio.server(
            maximum_concurrent_rpcs=_MAX_STREAMS,
            options=[
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),  # otherwise a port in use is no error
                ("grpc.keepalive_time_ms", round(1000 * _KEEPALIVE_S)),
                ("grpc.keepalive_timeout_ms", round(1000 * _KEEPALIVE_TIMEOUT_S)),
                ("grpc.http2.ping_timeout_ms", round(1000 * _KEEPALIVE_TIMEOUT_S)),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )
        self._probed = grpc.aio.server()  # Kubernetes' probes of gRPC do not support TLS
        self._tasks: list[asyncio.Task[None]] = []
        self.port = config.port

    async def start(self) -> None:
        """Listen, and begin to scrape.

        Raises InvalidValueError for pods outside of a pod, RuntimeError for a port in use.
        """
        watcher = self._pod_watcher() if self._config.pod_selector else None
        self._grpc.add_generic_rpc_handlers((self._processor.handler(),))
        if self.scaler is not None:
            self._grpc.add_generic_rpc_handlers((ExternalScaler(self.scaler).handler(),))
        for server in (self._grpc, self._probed):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set_health()
        self.port = self._listen()
        await self._grpc.start()
        if self._config.health_port is not None:
            self._probed.add_insecure_port(address_of(self._config.host, self._config.health_port))
            await self._probed.start()
        if watcher is None:
            self.pool.set_addresses(self._config.endpoints)
        else:
            self._begin(watcher.run())
        self._begin(Scraper(self.pool, self._config.scrape, Random()).run())
        self._begin(self._follow_health())
        if self.scaler is not None:
            self._begin(self.scaler.run())

    def _begin(self, run: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(run))

    def _pod_watcher(self) -> PodWatcher:
        config = self._config
        cluster = Cluster.of_pod(config.namespace)
        return PodWatcher(cluster, config.pod_selector, config.pod_port, self.pool.set_addresses)

    def _listen(self) -> int:
        config = self._config
        address = address_of(config.host, config.port)
        if config.tls_self_signed:
            credentials = grpc.ssl_server_credentials([self_signed()])
        elif config.tls_key_file is not None and config.tls_cert_file is not None:
            credentials = grpc_credentials(config.tls_key_file, config.tls_cert_file)
        else:
            return int(self._grpc.add_insecure_port(address))
        return int(self._grpc.add_secure_port(address, credentials))

    async def _follow_health(self) -> None:
        """Become ready once each endpoint is known, and has been scraped."""
        while not self.pool.is_synced:
            await asyncio.sleep(_HEALTH_PERIOD_S)
        await self._set_health()

    async def _set_health(self) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        ready = status.SERVING if self.pool.is_synced else status.NOT_SERVING
        for name in ("", READINESS, SERVICE):
            await self._health.set(name, ready)
        await self._health.set(LIVENESS, status.SERVING)

    async def wait(self, stopped: asyncio.Event) -> None:
        """Wait until `stopped` is set, or a task has failed, whose error is raised."""
        stop = asyncio.create_task(stopped.wait())
        running = {stop, *self._tasks}
        while not stop.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def close(self, accept_s: float = 0.0, drain_timeout_s: float = 0.0) -> None:
        """Report not ready, accept requests for `accept_s` more, and leave open ones to the proxy.

        Where it needs answers still, it gets them for `drain_timeout_s`.
        """
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(accept_s)
        self._processor.drain(drain_timeout_s)
        grace_s = drain_timeout_s + _GRACE_S
        await asyncio.gather(stop_server(self._grpc, grace_s), stop_server(self._probed, _GRACE_S))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def serve(config: PickerConfig) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends the process at once.

    Raises InvalidValueError for a port that is not free.
    """
    config.check_ports()
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stopped.set)
    server = PickerServer(config)
    await server.start()
    if config.metrics_port is not None:
        start_http_server(config.metrics_port, config.host, registry_of(server.pool, server.scaler))
    logger.info("listens on %s", address_of(config.host, server.port))
    drain_timeout_s = 0.0
    try:
        await server.wait(stopped)
        drain_timeout_s = config.drain_timeout_s
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        await server.close(_ACCEPT_S, drain_timeout_s)
