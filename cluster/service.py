"""`specdec serve`: a Ray of its own, Serve on it, the Router on that, until a signal comes."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from cluster.addresses import address_of
from cluster.admin_access import read_token
from cluster.config import ServeConfig
from cluster.control_store import ControlStore, state_dir
from cluster.memory_plan import memory_plan
from cluster.models import FoundByDriver, ModelDirectories, resolve_models
from cluster.openai.api_keys import read_keys
from cluster.resources import available_cpus, check_ranks, memory_per_replica
from cluster.surroundings import listen_error
from specdec.errors import SpecdecError

Report = Callable[[str], None]

_DRAIN_ANSWER_TIMEOUT_S = 5.0  # beyond the drain itself, for a replica that hangs
_STOP_TIMEOUT_S = 15.0
_EXIT_TIMEOUT_S = 5.0
_OBJECT_STORE_BYTES = 100 * 2**20  # steps do not travel through it

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A service at rest should be at rest: by default these loops wake ten times a second.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1.0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    # Where replicas follow the load, several reports fall into the time that is looked back on.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2.0",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # so that the next line applies
    "LOG_NAME_UPDATE_INTERVAL_S": "1.0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_health_check_period_ms": "10000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # of statistics that nothing here reads
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    # By default Ray's workers give way to every other process, clients and Ray's own included.
    "RAY_worker_niceness": "0",
    # Log lines say where they come from, and each is to appear as it was written.
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_DEDUP_LOGS": "0",
}

# At info it writes of every call, as we do ourselves, and with less in it.
_SERVE_LOG_LEVELS = {"debug": "DEBUG", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}


class StartupError(SpecdecError):
    """The service did not come up; the message says why."""


def serve_forever(config: ServeConfig, report: Report) -> None:
    """Starts everything, reports each stage, and returns after SIGINT or SIGTERM.

    Everything that was started is gone when it returns. Raises SpecdecError when start-up fails.
    """
    signals = _Signals()
    with running_service(config, report, signals.hurry):
        signals.wait()
        report(_how_to_hurry(config))


@contextmanager
def running_service(
    config: ServeConfig, report: Report, hurry: threading.Event | None = None
) -> Iterator[None]:
    """The service on a Ray of its own, for as long as the context lasts.

    Then running requests may end within drain_timeout_s, unless `hurry` is set.
    """
    started_at = time.monotonic()
    read_token("admin_token_file", config.admin_token_file)  # what is wrong with it is told here
    read_keys("api_key_file", config.api_key_file)
    for port in (config.grpc_port, config.http_port):
        _require_free_port(config.host, port)
    directories = resolve_models(config, report)
    memory_bytes = memory_per_replica(config)  # before anything of ours takes some
    _check_resources(config, directories, memory_bytes)
    _report_overrides(config, report)
    report("starting Ray")
    try:
        _start_ray(config)
        report(f"loading {config.served_model_name} on {config.tensor_parallel_size} rank(s)")
        deploy(config, FoundByDriver(directories, memory_bytes, config.most_replicas))
        report(_how_to_call(config, time.monotonic() - started_at))
        yield
    finally:
        _stop_ray(config.drain_timeout_s, hurry or threading.Event())


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


def _check_resources(config: ServeConfig, directories: ModelDirectories, memory_bytes: int) -> None:
    """Finds out here what the Router would only find out after half a minute."""
    models = directories.configs()
    check_ranks(config, models, available_cpus())
    memory_plan(config, models, memory_bytes)


def _report_overrides(config: ServeConfig, report: Report) -> None:
    """Says what an operator has set in an earlier run, since it wins over the configuration."""
    stored = ControlStore(state_dir(config.state_dir), config.served_model_name).read()
    has_expired = stored.expires_at_s is not None and stored.expires_at_s <= time.time()
    if config.speculative_config is not None and stored.overrides and not has_expired:
        values = ", ".join(f"{name} {value}" for name, value in stored.overrides.items())
        by = f" by {stored.updated_by}" if stored.updated_by else ""
        report(f"speculation as set{by}: {values}; `specdec speculation reset` takes it back")


def _start_ray(config: ServeConfig) -> None:
    """A Ray for this service alone, closed to whoever lacks its token."""
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray  # reads the environment when it is imported
    from ray import serve

    from cluster.deployment import grpc_options

    ray.init(
        address="local",
        num_cpus=available_cpus(),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=True,  # what the Router and the shards log appears here
        logging_level=logging.ERROR,
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    embedded = config.ingress == "embedded"
    serve.start(
        proxy_location="Disabled" if embedded else "HeadOnly",
        http_options={"host": config.host, "port": config.http_port},
        grpc_options=None if embedded else grpc_options(config),
        logging_config={"log_level": _SERVE_LOG_LEVELS[config.log_level]},
    )


def deploy(config: ServeConfig, found: FoundByDriver) -> None:
    """Brings the service up, or to another configuration, one replica after the other.

    Returns when it answers. Raises StartupError.
    """
    from ray import serve

    from cluster.deployment import APPLICATION, make_application

    try:
        serve.run(
            make_application(config, found),
            name=APPLICATION,
            route_prefix="/",
        )
    except RuntimeError as error:
        raise StartupError(f"the Router did not start: {_failure_reason()}") from error


def _failure_reason() -> str:
    """The last line of what Serve recorded of the failed start: the error without its traceback."""
    from ray import serve

    from cluster.deployment import APPLICATION

    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return "Ray Serve does not know it"
    messages = [deployment.message for deployment in application.deployments.values()]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    return str(lines[-1] if lines else application.message)


def _how_to_call(config: ServeConfig, elapsed_s: float) -> str:
    grpc_address = address_of(config.host, config.grpc_port)
    http_address = address_of(config.host, config.http_port)
    scheme, tls_flag = ("https", " --tls-ca-file CA.pem") if config.tls_cert_file else ("http", "")
    return (
        f"{config.served_model_name} is ready after {elapsed_s:.0f} s; Ctrl-C stops it\n"
        f"  gRPC  {grpc_address} (specdec.v1.InferenceService, AdminService, health, reflection)\n"
        f"  HTTP  {scheme}://{http_address}/health, /ready and /metrics\n"
        f"  try   specdec generate --address {grpc_address}{tls_flag} 'Why is the sky blue?'"
    )


def _how_to_hurry(config: ServeConfig) -> str:
    return (
        f"stopping; running requests have up to {config.drain_timeout_s:g} s to end, "
        "Ctrl-C ends them now"
    )


def _stop_ray(drain_timeout_s: float, hurry: threading.Event) -> None:
    """Drains the replicas and ends everything; without the drain once `hurry` is set."""
    import ray
    from ray import serve

    from cluster.deployment import APPLICATION

    if not ray.is_initialized():
        return
    started = psutil.Process().children(recursive=True)

    def delete() -> None:
        # What can go wrong is that Ray or Serve is gone already, which is what is wanted.
        with suppress(Exception):
            _drain_replicas(drain_timeout_s)
        if hurry.is_set():
            return  # Ray is being shut down, and asking Serve for something would start another
        with suppress(Exception):
            serve.delete(APPLICATION)
        hurry.set()  # there is nothing left to wait for

    # Lets the replica close its servers and shards; a Ray that was hit itself will not answer.
    threading.Thread(target=delete, daemon=True).start()
    hurry.wait(drain_timeout_s + _DRAIN_ANSWER_TIMEOUT_S + _STOP_TIMEOUT_S)
    ray.shutdown()
    _, left_over = psutil.wait_procs(started, timeout=_EXIT_TIMEOUT_S)
    for process in left_over:
        process.kill()


def _drain_replicas(timeout_s: float) -> None:
    """All at once, and before Serve hears of it: its proxies would turn clients away at once."""
    from ray import serve

    from cluster.deployment import APPLICATION, ROUTER

    application = serve.status().applications.get(APPLICATION)
    if application is None or not application.deployments[ROUTER].replica_states.get("RUNNING"):
        return  # it did not come up, or has lost its replicas
    drained = serve.get_deployment_handle(ROUTER, APPLICATION).broadcast("drain")
    drained.results(timeout_s=timeout_s + _DRAIN_ANSWER_TIMEOUT_S)
