"""`specdec serve`: starts Ray and the Serve applications, and stops them on a signal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile

from cluster.api.base.authentication import access_summary, read_keys, read_token, samples_warning
from cluster.config.config_file import application_name, check_prefix
from cluster.config.network import address_of, check_certificate, listen_error
from cluster.config.running_services import RunningService, recorded
from cluster.config.serve_config import ServeConfig
from cluster.control.store import ControlStore, state_dir
from cluster.serve.first_command import command_name, first_command
from cluster.serve.guard import print_line
from cluster.serve.processes import ToGuard
from cluster.serve.ray_session import Listening, RaySession
from cluster.serve.reminder import Reminder
from cluster.serve.signals import Signals
from cluster.serve.start_errors import StartupError, wait_until_running
from cluster.workers.ray.ray_internals import route_prefixes
from cluster.workers.ray.resources import (
    LocatedModels,
    check_ranks,
    check_together,
    memory_per_replica,
    require_placeable,
)
from cluster.workers.shared_draft.seat_memory import seat_of_worker
from specdec.config.gpu.gpu_sharing import with_gpu_sharing
from specdec.config.hardware import available_cpus, num_gpus, require_gpu
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.colocation import with_colocated_draft
from specdec.engine.models.model_detection import with_detected_models
from specdec.engine.models.model_resolution import (
    ModelDirectories,
    resolve_models,
    with_resolved_dtype,
)
from specdec.engine.models.preflight import check_draft_model, check_target
from specdec.llm.drafter_choice import with_fastest_drafter
from specdec.text.chat_template import read_template
from specdec.types.errors import InvalidValueError

Report = Callable[[str], None]

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # the keys bind nothing


@dataclass(frozen=True)
class ServedModel:
    """A model to serve. located: None if its replicas locate the model on their nodes."""

    config: ServeConfig
    located: LocatedModels | None = None

    @property
    def application(self) -> str:
        """The name of its Serve application."""
        return application_name(self.config)

    def reporting_to(self, refusal: Path) -> LocatedModels | None:
        """Return `located` with the file for reasons not to start."""
        return None if self.located is None else replace(self.located, refusal=refusal)


def serve_forever(
    config: ServeConfig,
    report: Report,
    others: Sequence[ServeConfig] = (),
    to_guard: ToGuard | None = None,
) -> None:
    """Run the service until SIGINT, SIGTERM or SIGHUP, and report each stage of its start.

    Everything that was started is stopped on return. Raises SpecdecError if start-up fails.
    """
    to_guard = to_guard or ToGuard()
    signals = Signals(to_guard)
    with (
        Reminder(report, remind=print_line) as reminder,
        running_service(config, reminder.report, signals.abort, others, to_guard),
    ):
        reminder.stop()
        signals.wait()
        drain_timeout_s = max(each.drain_timeout_s for each in (config, *others))
        print_line(  # a reader of standard error that has stopped delays no end
            f"stopping; running requests have up to {drain_timeout_s:g} s to finish, press Ctrl-C "
            "again to abort them"
        )


@contextmanager
def running_service(
    config: ServeConfig,
    report: Report,
    abort: threading.Event | None = None,
    others: Sequence[ServeConfig] = (),
    to_guard: ToGuard | None = None,
) -> Iterator[None]:
    """Run the service on a local Ray instance or an existing cluster, within the context.

    others: configurations of further models, with the same service-wide settings as `config`. At
    the end of the context, running requests have drain_timeout_s to finish, unless `abort` is set.
    """
    started_at = time.monotonic()
    configs, session = (config, *others), RaySession(config, others, to_guard)
    access = _access(configs)  # raises for an invalid file
    served = (
        [ServedModel(with_detected_models(each, report, downloads=False)) for each in configs]
        if session.is_joined
        else _locate_models(configs, report)
    )
    report(f"joining Ray at {config.ray_address}" if session.is_joined else "starting Ray")
    started: list[str] = []  # names of our applications
    try:
        session.start()
        if session.is_joined:
            _check_cluster(served)
        started += [each.application for each in served]
        _report_loading(configs, report)
        routes = deploy(served)
        elapsed_s = time.monotonic() - started_at
        report(_ready_message(configs, session.listening, routes[served[0].application], elapsed_s))
        with ExitStack() as stack:
            if not session.is_joined:  # otherwise the nodes' environment counts, and replicas log
                report(f"  {access}")
                _warn_of_open_samples(configs, report)
                stack.enter_context(_listed(configs, session.listening, report))
            yield
    finally:
        drain_timeout_s = max(each.drain_timeout_s for each in configs)
        session.stop(started, drain_timeout_s, abort or threading.Event())


def _report_loading(configs: Sequence[ServeConfig], report: Report) -> None:
    for each in configs:
        count = each.tensor_parallel_size
        report(f"loading {each.served_model_name} on {count} rank{'s' if count > 1 else ''}")


def _called_addresses(listening: Listening) -> tuple[str, str]:
    """Return the addresses of gRPC and HTTP that a client on this machine calls.

    That of all interfaces becomes the loopback's, which is a name in certificates.
    """
    host = _LOOPBACK_OF.get(listening.host, listening.host)
    return address_of(host, listening.grpc_port), address_of(host, listening.http_port)


@contextmanager
def _listed(configs: Sequence[ServeConfig], listening: Listening, report: Report) -> Iterator[None]:
    """Let the commands of this user find the service within the context."""
    names = tuple(each.served_model_name for each in configs)
    service = RunningService.of_this_process(*_called_addresses(listening), names)
    with ExitStack() as stack:
        try:
            stack.enter_context(recorded(service))
        except OSError as error:
            report(f"warning: commands need --address: the service is not listed ({error})")
        yield


def _access(configs: Sequence[ServeConfig]) -> str:
    """Return one line about what is open to which clients, by model where that differs.

    Raises InvalidValueError for an unusable file of keys or a token.
    """
    summaries: dict[str, list[str]] = {}
    for each in configs:
        summary = access_summary(*_credentials(each))
        summaries.setdefault(summary, []).append(each.served_model_name)
    if len(summaries) == 1:
        [text] = summaries
    else:
        text = "; ".join(f"{', '.join(names)}: {each}" for each, names in summaries.items())
    return f"access: {text}; health and metrics are open"


def _credentials(config: ServeConfig) -> tuple[bool, bool]:
    """Return whether a model has an admin token, and whether it has API keys."""
    has_token = read_token("admin_token_file", config.admin_token_file) is not None
    return has_token, bool(read_keys("api_key_file", config.api_key_file))


def _warn_of_open_samples(configs: Sequence[ServeConfig], report: Report) -> None:
    for each in configs:
        if (warning := samples_warning(each, *_credentials(each))) is not None:
            report(f"warning: {warning}")


def _require_free_port(config: ServeConfig, setting: str) -> None:
    port = getattr(config, setting)
    if (error := listen_error(config.host, port)) is None:
        return
    reason = (error.strerror or str(error)).lower()
    message = f"cannot listen on {address_of(config.host, port)} ({setting}): {reason}"
    raise StartupError(message) from error


def _locate_models(configs: Sequence[ServeConfig], report: Report) -> list[ServedModel]:
    """Check ports, and locate models and memory, on the only node of a local Ray instance."""
    for setting in ("grpc_port", "http_port"):
        _require_free_port(configs[0], setting)
    _check_files(configs)
    num_replicas = sum(config.most_replicas for config in configs)
    configs = [with_detected_models(each, report) for each in configs]
    for config in configs:  # before drafters are measured, which may compile the kernels
        memory_bytes = memory_per_replica(config, num_replicas)
        _check_resources(config, check_target(config, report), memory_bytes)
    configs = [with_fastest_drafter(each, report) for each in configs]
    configs = [_with_gpu_sharing(each, report) for each in configs]
    directories = [resolve_models(config, report) for config in configs]
    check_together(configs, available_cpus(), num_gpus)
    served = []
    for config, each in zip(configs, directories, strict=True):
        check_draft_model(config, each, report)
        memory_bytes = memory_per_replica(config, num_replicas)  # before Ray allocates memory
        _check_resources(config, each, memory_bytes)
        _report_overrides(config, report)
        served.append(ServedModel(config, LocatedModels(each, memory_bytes, num_replicas)))
    return served


def _check_files(configs: Sequence[ServeConfig]) -> None:
    """Raise InvalidValueError for a missing GPU, and for files of the service that are unusable.

    Creates missing directories and the database of the speculation settings.
    """
    for each in configs:
        if each.device == "cuda":
            require_gpu()
        if each.chat_template is not None:
            read_template(each.chat_template)
        ControlStore(state_dir(each.state_dir), each.served_model_name)
        if each.profile_dir is not None:
            _require_writable("profile_dir", each.profile_dir)
    check_certificate(configs[0].tls_cert_file, configs[0].tls_key_file)


def _require_writable(setting: str, directory: Path) -> None:
    """Create a directory where it is missing. Raise InvalidValueError if no file can be in it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        limit = f"a directory that can be written to ({error})"
        raise InvalidValueError(setting, str(directory), limit) from error


def _with_gpu_sharing(config: ServeConfig, report: Report) -> ServeConfig:
    """Let target and draft model share the only GPU of this machine, in one process if possible."""
    if config.device == "cpu" or config.draft_model is None:
        return config
    decided = with_gpu_sharing(config, num_gpus())
    return with_colocated_draft(decided, report) if decided.shares_gpu else decided


def _check_resources(config: ServeConfig, directories: ModelDirectories, memory_bytes: int) -> None:
    """Raise now for missing resources, which the Router would detect after half a minute."""
    models = directories.configs()
    check_ranks(config, models, available_cpus())
    if config.shares_draft_workers and models.draft is not None:
        seat_of_worker(config, models, memory_bytes, is_shared=True)
    memory_plan(with_resolved_dtype(config, models), models, memory_bytes)


def _check_cluster(served: Sequence[ServedModel]) -> None:
    """Raise StartupError for a running application of the same name, which would be replaced."""
    import ray
    from ray import serve

    running = serve.status().applications
    for each in served:
        if each.application in running:
            raise StartupError(
                f"application {each.application} already runs on this cluster; stop it, or set "
                "another served_model_name"
            )
    require_placeable([each.config for each in served], ray.nodes())


def _report_overrides(config: ServeConfig, report: Report) -> None:
    """Report persisted speculation overrides, which take precedence over the configuration."""
    stored = ControlStore(state_dir(config.state_dir), config.served_model_name).read()
    has_expired = stored.expires_at_s is not None and stored.expires_at_s <= time.time()
    if config.speculative_config is not None and stored.overrides and not has_expired:
        values = ", ".join(f"{name} {value}" for name, value in stored.overrides.items())
        by = f" by {stored.updated_by}" if stored.updated_by else ""
        report(
            f"speculation overrides{by}: {values}; reset with `{command_name()} speculation reset`"
        )


def deploy(served: Sequence[ServedModel]) -> dict[str, str]:
    """Deploy the models, or update running ones one replica at a time.

    Returns the route prefix of each application when all are ready. Raises StartupError, and
    InvalidValueError for a name that cannot be a prefix.
    """
    from ray import serve

    from cluster.serve.application import make_application

    routes = _routes(served)
    with NamedTemporaryFile("r", prefix="specdec-refusal-", encoding="utf-8") as refusal:
        targets = [
            serve.RunTarget(
                make_application(each.config, each.reporting_to(Path(refusal.name))),
                name=each.application,
                route_prefix=routes[each.application],
            )
            for each in served
        ]
        serve.run_many(targets, wait_for_applications_running=False)
        wait_until_running([each.application for each in served], refusal)
    return routes


def _routes(served: Sequence[ServedModel]) -> dict[str, str]:
    """Return route prefixes: / for the first, unless it is taken, and the names for the others."""
    ours = {each.application for each in served}
    has_root = any(each == "/" for name, each in route_prefixes().items() if name not in ours)
    routes = {}
    for index, each in enumerate(served):
        is_root = index == 0 and not has_root
        if not is_root:
            check_prefix(each.config)
        routes[each.application] = "/" if is_root else f"/{each.application}"
    return routes


def _ready_message(
    configs: Sequence[ServeConfig], listening: Listening, prefix: str, elapsed_s: float
) -> str:
    """Return the message with the addresses. prefix: route prefix of the first model."""
    config = configs[0]
    grpc_address = address_of(listening.host, listening.grpc_port)
    http_address = address_of(listening.host, listening.http_port)
    scheme, tls_flag = ("https", " --tls-ca-file CA.pem") if config.tls_cert_file else ("http", "")
    names = ", ".join(each.served_model_name for each in configs)
    verb = "is" if len(configs) == 1 else "are"
    path = prefix.rstrip("/")
    url = f"{scheme}://{http_address}{path}"
    called_grpc, called_http = _called_addresses(listening)
    model, example = "", first_command(f"{called_grpc}{tls_flag}")
    if prefix != "/":  # a request without a model name goes to the model at /
        model = f", model {config.served_model_name}"
        example = f"curl {scheme}://{called_http}{path}/v1/models"
    return (
        f"{names} {verb} ready after {elapsed_s:.0f} s; press Ctrl-C to stop\n"
        f"  gRPC  {grpc_address}{model} (specdec.v1.InferenceService, AdminService, health, "
        "reflection)\n"
        f"  HTTP  {url}/v1 (OpenAI API), /health, /ready and /metrics\n"
        f"  see   {url}/dashboard\n"
        f"  try   {example}"
    )
