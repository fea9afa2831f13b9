"""`specdec serve`: Ray, Serve on it, the Routers on that, until a signal comes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.api.admin_token import read_token
from cluster.api.api_keys import read_keys
from cluster.config.multi_model import application_name, check_prefix
from cluster.config.network import address_of, listen_error
from cluster.config.serve_config import ServeConfig
from cluster.control.store import ControlStore, state_dir
from cluster.serve.ray_session import Listening, RaySession, StartupError
from cluster.workers.placement import require_placeable
from cluster.workers.resources import FoundByDriver, check_ranks, check_together, memory_per_replica
from specdec.config.hardware import available_cpus, num_gpus
from specdec.engine.memory_plan import memory_plan
from specdec.engine.model_resolution import ModelDirectories, resolve_models, with_resolved_dtype

Report = Callable[[str], None]


@dataclass(frozen=True)
class Served:
    """A model to serve. found: None lets its replicas find out on their nodes."""

    config: ServeConfig
    found: FoundByDriver | None = None

    @property
    def application(self) -> str:
        """What Serve calls it."""
        return application_name(self.config)


def serve_forever(config: ServeConfig, report: Report, others: Sequence[ServeConfig] = ()) -> None:
    """Starts everything, reports each stage, and returns after SIGINT or SIGTERM.

    Everything that was started is gone when it returns. Raises SpecdecError when start-up fails.
    """
    signals = _Signals()
    with running_service(config, report, signals.hurry, others):
        signals.wait()
        report(_how_to_hurry(config))


@contextmanager
def running_service(
    config: ServeConfig,
    report: Report,
    hurry: threading.Event | None = None,
    others: Sequence[ServeConfig] = (),
) -> Iterator[None]:
    """The service on a Ray of its own, or on the one it is to join, while the context lasts.

    others: further models, whose settings of the whole service are those of `config`. When the
    context ends, running requests may end within drain_timeout_s, unless `hurry` is set.
    """
    started_at = time.monotonic()
    configs, session = (config, *others), RaySession(config)
    for each in configs:
        read_token("admin_token_file", each.admin_token_file)  # what is wrong is told here
        read_keys("api_key_file", each.api_key_file)
    served = [Served(each) for each in configs] if session.is_joined else _find(configs, report)
    report(f"joining Ray at {config.ray_address}" if session.is_joined else "starting Ray")
    to_end: list[str] = []  # applications that are ours
    try:
        session.start()
        if session.is_joined:
            _check_cluster(served)
        to_end += [each.application for each in served]
        for each in configs:
            report(f"loading {each.served_model_name} on {each.tensor_parallel_size} rank(s)")
        routes = deploy(served)
        elapsed_s = time.monotonic() - started_at
        report(_how_to_call(configs, session.listening, routes[served[0].application], elapsed_s))
        yield
    finally:
        drain_timeout_s = max(each.drain_timeout_s for each in configs)
        session.stop(to_end, drain_timeout_s, hurry or threading.Event())


class _Signals:
    """The first SIGINT or SIGTERM asks to stop, the second one to stop without delay."""

    def __init__(self) -> None:
        self.hurry = threading.Event()
        self._stop = threading.Event()

    def wait(self) -> None:
        """Returns at the first. Called after Ray has started, which takes SIGTERM for itself."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)
        self._stop.wait()

    def _receive(self, *_: object) -> None:
        (self.hurry if self._stop.is_set() else self._stop).set()


def _require_free_port(host: str, port: int) -> None:
    if (error := listen_error(host, port)) is not None:
        reason = (error.strerror or str(error)).lower()
        raise StartupError(f"cannot listen on {host}:{port}: {reason}") from error


def _find(configs: Sequence[ServeConfig], report: Report) -> list[Served]:
    """Models, ports and memory, on the only node that there is to be."""
    for port in (configs[0].grpc_port, configs[0].http_port):
        _require_free_port(configs[0].host, port)
    directories = [resolve_models(config, report) for config in configs]
    num_replicas = sum(config.most_replicas for config in configs)
    check_together(configs, available_cpus(), num_gpus)
    served = []
    for config, each in zip(configs, directories, strict=True):
        memory_bytes = memory_per_replica(config, num_replicas)  # before anything takes some
        _check_resources(config, each, memory_bytes)
        _report_overrides(config, report)
        served.append(Served(config, FoundByDriver(each, memory_bytes, num_replicas)))
    return served


def _check_resources(config: ServeConfig, directories: ModelDirectories, memory_bytes: int) -> None:
    """Finds out here what the Router would only find out after half a minute."""
    models = directories.configs()
    check_ranks(config, models, available_cpus())
    memory_plan(with_resolved_dtype(config, models), models, memory_bytes)


def _check_cluster(served: Sequence[Served]) -> None:
    """Raises StartupError for an application that runs there; it would be replaced, and ended."""
    import ray
    from ray import serve

    running = serve.status().applications
    for each in served:
        if each.application in running:
            raise StartupError(
                f"an application {each.application} runs there already; stop it, or choose another "
                "served_model_name"
            )
    require_placeable([each.config for each in served], ray.nodes())


def _report_overrides(config: ServeConfig, report: Report) -> None:
    """Says what an operator has set in an earlier run, since it wins over the configuration."""
    stored = ControlStore(state_dir(config.state_dir), config.served_model_name).read()
    has_expired = stored.expires_at_s is not None and stored.expires_at_s <= time.time()
    if config.speculative_config is not None and stored.overrides and not has_expired:
        values = ", ".join(f"{name} {value}" for name, value in stored.overrides.items())
        by = f" by {stored.updated_by}" if stored.updated_by else ""
        report(f"speculation as set{by}: {values}; `specdec speculation reset` takes it back")


def deploy(served: Sequence[Served]) -> dict[str, str]:
    """Brings the models up, or to other configurations, one replica after the other.

    Returns the prefixes of their paths, by application, when all answer. Raises StartupError, and
    InvalidValueError for a name that cannot be a prefix.
    """
    from ray import serve

    from cluster.serve.deployment import make_application

    routes = _routes(served)
    targets = [
        serve.RunTarget(
            make_application(each.config, each.found),
            name=each.application,
            route_prefix=routes[each.application],
        )
        for each in served
    ]
    try:
        serve.run_many(targets)
    except RuntimeError as error:
        reasons = "; ".join(_failure_reasons([each.application for each in served]))
        raise StartupError(f"the Router did not start: {reasons}") from error
    return routes


def _routes(served: Sequence[Served]) -> dict[str, str]:
    """The first has the root, unless an application of before has it; the others their names."""
    from ray import serve

    before, ours = serve.status().applications, {each.application for each in served}
    has_root = any(each.route_prefix == "/" for name, each in before.items() if name not in ours)
    routes = {}
    for index, each in enumerate(served):
        is_root = index == 0 and not has_root
        if not is_root:
            check_prefix(each.config)
        routes[each.application] = "/" if is_root else f"/{each.application}"
    return routes


def _failure_reasons(names: Sequence[str]) -> Iterator[str]:
    """The last line of what Serve recorded of each failed start: an error without traceback."""
    from ray import serve

    for name, application in serve.status().applications.items():
        if name not in names or application.status == "RUNNING":
            continue
        messages = [deployment.message for deployment in application.deployments.values()]
        lines = [line.strip() for each in messages for line in each.splitlines() if line.strip()]
        yield str(lines[-1] if lines else application.message)


def _how_to_call(
    configs: Sequence[ServeConfig], listening: Listening, prefix: str, elapsed_s: float
) -> str:
    """prefix: of the paths of the first, "/" unless it joined an application that has that."""
    config = configs[0]
    grpc_address = address_of(listening.host, listening.grpc_port)
    http_address = address_of(listening.host, listening.http_port)
    scheme, tls_flag = ("https", " --tls-ca-file CA.pem") if config.tls_cert_file else ("http", "")
    names = ", ".join(each.served_model_name for each in configs)
    verb = "is" if len(configs) == 1 else "are"
    url = f"{scheme}://{http_address}{prefix.rstrip('/')}"
    by_name = ""
    how_to_try = f"specdec generate --address {grpc_address}{tls_flag} 'Why is the sky blue?'"
    if prefix != "/":  # who names no model is answered by the one that has the root
        by_name, how_to_try = f", model {config.served_model_name}", f"curl {url}/v1/models"
    return (
        f"{names} {verb} ready after {elapsed_s:.0f} s; Ctrl-C stops it\n"
        f"  gRPC  {grpc_address}{by_name} (specdec.v1.InferenceService, AdminService, health, "
        "reflection)\n"
        f"  HTTP  {url}/health, /ready and /metrics\n"
        f"  try   {how_to_try}"
    )


def _how_to_hurry(config: ServeConfig) -> str:
    return (
        f"stopping; running requests have up to {config.drain_timeout_s:g} s to end, "
        "Ctrl-C ends them now"
    )
