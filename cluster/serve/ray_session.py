"""The Ray that a service runs on: one of its own, or one that it joins; and Serve on it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from cluster.config.serve_config import ServeConfig
from cluster.workers.cpu_scheduling import starting_batch_work
from cluster.workers.ray_runtime import LocalRay, prepare_environment, start_ray, stop_ray
from specdec.types.errors import SpecdecError

logger = logging.getLogger(__name__)

_DRAIN_ANSWER_TIMEOUT_S = 5.0  # beyond the drain itself, for a replica that hangs
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2

# At info it writes of every call, as we do ourselves, and with less in it.
_SERVE_LOG_LEVELS = {"debug": "DEBUG", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}


class StartupError(SpecdecError):
    """The service did not come up; the message says why."""


@dataclass(frozen=True)
class Listening:
    """Where Serve's proxies, or our own servers, take calls."""

    host: str
    grpc_port: int
    http_port: int


class RaySession:
    """Ray and Serve for as long as a service runs. Ends what it has started, and nothing else."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._starts_serve = True
        self._listening = Listening(config.host, config.grpc_port, config.http_port)
        self._own_ray: LocalRay | None = None

    @property
    def is_joined(self) -> bool:
        """Whether Ray is somebody else's."""
        return self._config.ray_address is not None

    @property
    def listening(self) -> Listening:
        """As configured; once it has started, as a Serve that ran already has it."""
        return self._listening

    def start(self) -> None:
        """Returns when Serve is there to deploy on. Raises StartupError."""
        if self.is_joined:
            self._join()
        else:
            with starting_batch_work():
                self._own_ray = start_ray()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        if self._starts_serve:
            self._start_serve()

    def _join(self) -> None:
        prepare_environment()
        import ray

        address = self._config.ray_address
        try:
            ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise StartupError(f"cannot join the Ray cluster at {address}: {reason}") from error
        try:
            controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        except ValueError:
            return
        self._starts_serve = False
        self._listening = _listening_there(controller, self._config)

    def _start_serve(self) -> None:
        from ray import serve

        from cluster.serve.deployment import grpc_options

        config = self._config
        embedded = config.ingress == "embedded"
        location = "EveryNode" if self.is_joined else "HeadOnly"
        serve.start(
            proxy_location="Disabled" if embedded else location,
            http_options={"host": config.host, "port": config.http_port},
            grpc_options=None if embedded else grpc_options(config),
            logging_config={"log_level": _SERVE_LOG_LEVELS[config.log_level]},
        )

    def stop(
        self, applications: Sequence[str], drain_timeout_s: float, hurry: threading.Event
    ) -> None:
        """Drains the replicas and ends everything; without the drain once `hurry` is set."""
        import ray

        if not ray.is_initialized():
            return
        own_ray = self._own_ray
        processes = [] if own_ray is None else own_ray.processes()

        def drain_and_delete() -> None:
            # What can go wrong is that Ray or Serve is gone already, which is what is wanted.
            with suppress(Exception):
                _drain_replicas(applications, drain_timeout_s)
            if hurry.is_set():
                return  # below is seen to it; a Serve that is asked as Ray ends would be another
            with suppress(Exception):
                self._delete(applications)
                deleted.set()
            hurry.set()  # there is nothing left to wait for

        deleted = threading.Event()
        # Lets the replica close its servers and shards; a Ray that was hit itself will not answer.
        threading.Thread(target=drain_and_delete, daemon=True).start()
        hurry.wait(drain_timeout_s + _DRAIN_ANSWER_TIMEOUT_S + _STOP_TIMEOUT_S)
        if self.is_joined and not deleted.is_set():
            self._break_off(applications)  # nobody else would end them
        stop_ray(processes)
        if own_ray is not None:
            own_ray.restore_environment()

    def _break_off(self, applications: Sequence[str]) -> None:
        """Ends what runs, and then the applications. They go even where nobody waits for it."""
        with suppress(Exception):
            _drain_replicas(applications, 0.0)
        try:
            self._delete(applications)
        except Exception as error:
            logger.warning("%s: `serve status` tells whether they still end", error)

    def _delete(self, applications: Sequence[str]) -> None:
        """All at once; returns when they are gone. Raises TimeoutError."""
        from ray import serve

        for name in applications:
            serve.delete(name, _blocking=False)
        _wait_until_gone(applications)
        if self.is_joined and self._starts_serve and not serve.status().applications:
            serve.shutdown()


def _listening_there(controller: Any, config: ServeConfig) -> Listening:
    """Where the Serve that runs there takes calls.

    Raises StartupError where it cannot carry ours, or elsewhere than `config` says. What is
    configured as it is by default may be anything there.
    """
    import ray

    http, grpc = ray.get([controller.get_http_config.remote(), controller.get_grpc_config.remote()])
    _require_servicers(grpc.grpc_servicer_functions)
    there = Listening(http.host, grpc.port, http.port)
    for each in fields(Listening):
        given, real = getattr(config, each.name), getattr(there, each.name)
        if given not in (real, getattr(ServeConfig, each.name)):
            reason = f"Serve runs there already, with {real}; leave it out, or end that Serve first"
            raise StartupError(f"{each.name} is {given}, but {reason}")
    return there


def _require_servicers(found: Sequence[str]) -> None:
    """Ours, in our order; there may be others between them."""
    from cluster.serve.deployment import GRPC_SERVICER_FUNCTIONS

    if [each for each in found if each in GRPC_SERVICER_FUNCTIONS] != list(GRPC_SERVICER_FUNCTIONS):
        raise StartupError(
            "Serve runs there already, and its gRPC does not carry this service: grpc_options must "
            f"list {', '.join(GRPC_SERVICER_FUNCTIONS)} as grpc_servicer_functions, in this order; "
            "end that Serve, and it is started as it has to be"
        )


def _wait_until_gone(applications: Sequence[str]) -> None:
    from ray import serve

    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while left := serve.status().applications.keys() & set(applications):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not gone after {_STOP_TIMEOUT_S:g} s: {', '.join(sorted(left))}")
        time.sleep(_POLL_S)


def _drain_replicas(applications: Sequence[str], timeout_s: float) -> None:
    """All at once, and before Serve hears of it: its proxies would turn clients away at once."""
    from ray import serve

    from cluster.control.peers import ROUTER

    found = serve.status().applications
    drained = []
    for name in applications:
        router = found[name].deployments.get(ROUTER) if name in found else None
        if router is None or not router.replica_states.get("RUNNING"):
            continue  # it did not come up, or has lost its replicas
        drained.append(serve.get_deployment_handle(ROUTER, name).broadcast("drain", timeout_s))
    for each in drained:
        each.results(timeout_s=timeout_s + _DRAIN_ANSWER_TIMEOUT_S)
