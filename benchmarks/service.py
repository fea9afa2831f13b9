"""The real service in its own process, for the duration of a benchmark."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.bystanders import tree_cpu_seconds
from cluster.config.serve_config import ServeConfig
from specdec.models.resolve import print_progress

_STOP_TIMEOUT_S = 60.0
_QUEUE_TIMEOUT_S = 1200.0  # requests must not time out in the queue on a slow machine


@dataclass(frozen=True)
class ServiceProcess:
    """Addresses of the service, and the root of its process tree."""

    address: str
    http_url: str
    pid: int

    def counters(self, *names: str) -> dict[str, int]:
        """Return counters of its metrics, by names without prefix and `_total`."""
        text = httpx.get(f"{self.http_url}/metrics", trust_env=False).text
        samples = {
            sample.name: int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return {name: samples[f"specdec:{name}_total"] for name in names}

    def cpu_percent(self, period_s: float) -> float:
        """Return the CPU usage of the process tree over a period, in percent of one core."""
        root = psutil.Process(self.pid)
        before, started_at = tree_cpu_seconds(root), time.monotonic()
        time.sleep(period_s)
        used = tree_cpu_seconds(root) - before
        return 100 * used / (time.monotonic() - started_at)


class ServiceDidNotStartError(Exception):
    """The service ended before it was ready; standard error has the reason."""


@contextmanager
def started_service(
    model: str, prepare: Callable[[], None] | None = None, **settings: Any
) -> Iterator[ServiceProcess]:
    """Start the service on free loopback ports, and stop it with all its processes at the end.

    prepare: a function of a module, which the process of the service calls before it starts.
    settings: fields of ServeConfig.
    """
    grpc_port, http_port = _free_ports(2)
    state = TemporaryDirectory(prefix="specdec-benchmark-")  # no stored overrides
    config = ServeConfig(
        model=model,
        grpc_port=grpc_port,
        http_port=http_port,
        state_dir=Path(state.name),
        **{"queue_timeout_s": _QUEUE_TIMEOUT_S, **settings},
    )
    # Ray can be initialized once per process, and its processes are identified by their ancestor.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (config.to_mapping(), theirs, prepare)
    process = context.Process(target=_serve, args=arguments, name="service")
    process.start()
    theirs.close()
    try:
        pid = _wait_until_ready(process, ours)
        yield ServiceProcess(f"{config.host}:{grpc_port}", f"http://{config.host}:{http_port}", pid)
    finally:
        ours.close()  # ends the child
        _end(process)
        state.cleanup()


def _serve(
    config: dict[str, Any], connection: Connection, prepare: Callable[[], None] | None
) -> None:
    """Serve in the child process until the parent closes its end of the pipe or dies."""
    from cluster.serve.startup import running_service

    if prepare is not None:
        prepare()
    with running_service(ServeConfig.from_mapping(config), print_progress):
        connection.send("ready")
        with suppress(EOFError, KeyboardInterrupt):
            connection.recv()


def _wait_until_ready(process: BaseProcess, connection: Connection) -> int:
    try:
        connection.recv()
    except EOFError as error:
        raise ServiceDidNotStartError from error
    assert process.pid is not None
    return process.pid


def _end(process: BaseProcess) -> None:
    process.join(_STOP_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()


def _free_ports(count: int) -> list[int]:
    """Return free ports; all stay bound until the last is found, so that they differ."""
    with closing(socket.socket()) as first, closing(socket.socket()) as second:
        sockets = [first, second][:count]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
