"""The Ray that a service runs on, private or joined, and Serve on it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields

from cluster.api.serve_proxy.grpc import MAX_MESSAGE_VARIABLE
from cluster.api.serve_proxy.http import (
    CALLBACK,
    CALLBACK_VARIABLE,
    GRPC_HOST_VARIABLE,
    MAX_BODY_VARIABLE,
    MAX_INFLIGHT_VARIABLE,
)
from cluster.config.serve_config import ServeConfig
from cluster.observability.logs import SERVE_LEVELS
from cluster.serve.processes import STOP_S, ToGuard
from cluster.serve.start_errors import InterruptedStartError, StartupError
from cluster.workers.cpu_scheduling import starting_batch_work
from cluster.workers.ray.ray_internals import ServeListeners, delete_application, serve_listeners
from cluster.workers.ray.ray_runtime import LocalRay, prepare_environment, start_ray, stop_ray

logger = logging.getLogger(__name__)

_DRAIN_ANSWER_TIMEOUT_S = 5.0  # beyond the drain itself, in case a replica hangs
_STOP_TIMEOUT_S = 15.0
_OWN_STOP_S = STOP_S - 1.0  # beyond the drain, with an own Ray, which then ends by force
_LAST_CALL_S = 0.2
_POLL_S = 0.2


@dataclass(frozen=True)
class Listening:
    """The addresses of Serve's proxies, or of the servers of the service itself."""

    host: str
    grpc_port: int
    http_port: int


class RaySession:
    """Ray and Serve for the lifetime of a service. Ends only what it has started."""

    def __init__(
        self,
        config: ServeConfig,
        others: Sequence[ServeConfig] = (),
        to_guard: ToGuard | None = None,
    ) -> None:
        """others: configurations of further models. to_guard: None where there is no guard."""
        self._config = config
        self._max_body_mib = max(each.http_max_body_mib for each in (config, *others))
        self._to_guard = to_guard or ToGuard()
        self._starts_serve = True
        self._listening = Listening(config.host, config.grpc_port, config.http_port)
        self._own_ray: LocalRay | None = None

    @property
    def is_joined(self) -> bool:
        """Return whether the service joins an existing Ray cluster."""
        return self._config.ray_address is not None

    @property
    def listening(self) -> Listening:
        """As configured; after `start`, as an existing Serve instance is configured."""
        return self._listening

    def start(self) -> None:
        """Return when Serve is ready for deployments. Raises StartupError."""
        if self.is_joined:
            self._join()
        else:
            self._set_limits_of_proxies()
            with starting_batch_work():
                self._own_ray = start_ray()
            self._to_guard.require(self._own_ray.vital_processes())
        logging.getLogger("ray.serve").addFilter(_is_error)  # Serve sets the level itself
        if self._starts_serve:
            self._start_serve()

    def _set_limits_of_proxies(self) -> None:
        """Set the environment variables that Serve's proxies will inherit."""
        config = self._config
        os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)
        os.environ[GRPC_HOST_VARIABLE] = config.host
        os.environ[MAX_BODY_VARIABLE] = str(self._max_body_mib)
        os.environ[MAX_INFLIGHT_VARIABLE] = str(config.max_inflight_mib)
        os.environ[MAX_MESSAGE_VARIABLE] = str(config.grpc_max_message_mib * 2**20)

    def _join(self) -> None:
        prepare_environment()
        import ray

        address = self._config.ray_address
        try:
            ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            message = f"cannot join the Ray cluster at {address}: {reason}"
            raise InterruptedStartError(message) from error
        existing = serve_listeners()
        if existing is not None:
            self._starts_serve = False
            self._listening = _existing_listening(existing, self._config)

    def _start_serve(self) -> None:
        from ray import serve

        from cluster.serve.application import grpc_options

        config = self._config
        embedded = config.ingress == "embedded"
        location = "EveryNode" if self.is_joined else "HeadOnly"
        serve.start(
            proxy_location="Disabled" if embedded else location,
            http_options={"host": config.host, "port": config.http_port},
            grpc_options=None if embedded else grpc_options(config),
            logging_config={"log_level": SERVE_LEVELS[config.log_level]},
        )

    def stop(
        self, applications: Sequence[str], drain_timeout_s: float, hurry: threading.Event
    ) -> None:
        """Drain the replicas and end everything; without the drain once `hurry` is set."""
        import ray

        if not ray.is_initialized():
            return
        own_ray = self._own_ray
        processes = [] if own_ray is None else own_ray.processes()

        def drain_and_delete() -> None:
            # Errors mean that Ray or Serve has ended already, which is the goal.
            with suppress(Exception):
                _drain_replicas(applications, drain_timeout_s)
            if hurry.is_set():
                return  # done below; calling Serve while Ray ends would start another Serve
            with suppress(Exception):
                self._delete(applications, hurry)
                deleted.set()
            hurry.set()  # nothing is left to wait for

        deleted = threading.Event()
        # The replica closes its servers and workers. Ray may not respond if it was killed too.
        draining = threading.Thread(target=drain_and_delete, daemon=True)
        draining.start()
        joined_stop_s = _DRAIN_ANSWER_TIMEOUT_S + _STOP_TIMEOUT_S
        hurry.wait(drain_timeout_s + (joined_stop_s if self.is_joined else _OWN_STOP_S))
        hurry.set()
        draining.join(_LAST_CALL_S)  # longer only while Ray does not answer it
        if self.is_joined and not deleted.is_set():
            self._abort(applications)  # the cluster goes on, and they with it
        self._to_guard.ending()
        stop_ray(processes)
        if own_ray is not None:
            own_ray.restore_environment()

    def _abort(self, applications: Sequence[str]) -> None:
        """Abort running requests and delete the applications, which end even after a timeout."""
        with suppress(Exception):
            _drain_replicas(applications, 0.0)
        try:
            self._delete(applications, threading.Event())
        except Exception as error:
            logger.warning("%s: check them with `serve status`", error)

    def _delete(self, applications: Sequence[str], hurry: threading.Event) -> None:
        """Delete all at once; return when they are gone.

        Raises TimeoutError if they are not, at the latest when `hurry` is set.
        """
        from ray import serve

        for name in applications:
            delete_application(name)
        _wait_until_gone(applications, hurry)
        if self.is_joined and self._starts_serve and not serve.status().applications:
            serve.shutdown()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _existing_listening(existing: ServeListeners, config: ServeConfig) -> Listening:
    """Return where an existing Serve instance listens.

    Raises StartupError if it does not mount the service's servicers, or listens elsewhere than
    `config` requires; a setting that has its default matches anything.
    """
    _require_servicers(existing.grpc_servicer_functions)
    listening = Listening(existing.host, existing.grpc_port, existing.http_port)
    for each in fields(Listening):
        given, real = getattr(config, each.name), getattr(listening, each.name)
        if given not in (real, getattr(ServeConfig, each.name)):
            reason = f"Serve runs there already, with {real}; leave it out, or end that Serve first"
            raise StartupError(f"{each.name} is {given}, but {reason}")
    return listening


def _require_servicers(found: Sequence[str]) -> None:
    """Require this service's servicers in order; others may be listed between them."""
    from cluster.serve.application import GRPC_SERVICER_FUNCTIONS

    if [each for each in found if each in GRPC_SERVICER_FUNCTIONS] != list(GRPC_SERVICER_FUNCTIONS):
        raise StartupError(
            "Serve runs there already, and its gRPC does not mount this service: grpc_options must "
            f"list {', '.join(GRPC_SERVICER_FUNCTIONS)} as grpc_servicer_functions, in this order; "
            "end that Serve, and the service starts it with the right options"
        )


def _wait_until_gone(applications: Sequence[str], hurry: threading.Event) -> None:
    from ray import serve

    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while left := serve.status().applications.keys() & set(applications):
        if time.monotonic() > deadline or hurry.wait(_POLL_S):
            raise TimeoutError(f"not gone after {_STOP_TIMEOUT_S:g} s: {', '.join(sorted(left))}")


def _drain_replicas(applications: Sequence[str], timeout_s: float) -> None:
    """Drain all at once, before Serve deletes them: its proxies would reject clients at once."""
    from ray import serve

    from cluster.control.peers import ROUTER

    found = serve.status().applications
    drained = []
    for name in applications:
        router = found[name].deployments.get(ROUTER) if name in found else None
        if router is None or not router.replica_states.get("RUNNING"):
            continue  # it did not start, or has lost its replicas
        drained.append(serve.get_deployment_handle(ROUTER, name).broadcast("drain", timeout_s))
    for each in drained:
        each.results(timeout_s=timeout_s + _DRAIN_ANSWER_TIMEOUT_S)
