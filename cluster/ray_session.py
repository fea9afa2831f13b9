"""The Ray that a service runs on: one of its own, or one that it joins; and Serve on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

import psutil

from cluster.config import ServeConfig
from cluster.local_ray import LocalRay, prepare_environment, start_ray, stop_ray
from specdec.errors import SpecdecError

_DRAIN_ANSWER_TIMEOUT_S = 5.0  # beyond the drain itself, for a replica that hangs
_STOP_TIMEOUT_S = 15.0

# At info it writes of every call, as we do ourselves, and with less in it.
_SERVE_LOG_LEVELS = {"debug": "DEBUG", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}


class StartupError(SpecdecError):
    """The service did not come up; the message says why."""


class RaySession:
    """Ray and Serve for as long as a service runs. Ends what it has started, and nothing else."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._starts_serve = True
        self._own_ray: LocalRay | None = None

    @property
    def is_joined(self) -> bool:
        """Whether Ray is somebody else's."""
        return self._config.ray_address is not None

    def start(self) -> None:
        """Returns when Serve is there to deploy on. Raises StartupError."""
        if self.is_joined:
            self._join()
        else:
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
            ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        except ValueError:
            return
        self._starts_serve = False

    def _start_serve(self) -> None:
        from ray import serve

        from cluster.deployment import grpc_options

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
        started = psutil.Process().children(recursive=True)

        def delete() -> None:
            # What can go wrong is that Ray or Serve is gone already, which is what is wanted.
            with suppress(Exception):
                _drain_replicas(applications, drain_timeout_s)
            if hurry.is_set() and not self.is_joined:
                return  # Ray is being shut down, and asking Serve for something would start another
            with suppress(Exception):
                self._delete(applications)
            deleted.set()
            hurry.set()  # there is nothing left to wait for

        deleted = threading.Event()
        # Lets the replica close its servers and shards; a Ray that was hit itself will not answer.
        threading.Thread(target=delete, daemon=True).start()
        hurry.wait(drain_timeout_s + _DRAIN_ANSWER_TIMEOUT_S + _STOP_TIMEOUT_S)
        if self.is_joined and not deleted.is_set():
            with suppress(Exception):  # nobody else would end them
                self._delete(applications)
        stop_ray(started)
        if self._own_ray is not None:
            self._own_ray.restore_environment()

    def _delete(self, applications: Iterable[str]) -> None:
        from ray import serve

        for name in applications:
            serve.delete(name)
        if self.is_joined and self._starts_serve and not serve.status().applications:
            serve.shutdown()


def _drain_replicas(applications: Iterable[str], timeout_s: float) -> None:
    """All at once, and before Serve hears of it: its proxies would turn clients away at once."""
    from ray import serve

    from cluster.applications import ROUTER

    found = serve.status().applications
    drained = []
    for name in applications:
        application = found.get(name)
        if application is None or not application.deployments[ROUTER].replica_states.get("RUNNING"):
            continue  # it did not come up, or has lost its replicas
        drained.append(serve.get_deployment_handle(ROUTER, name).broadcast("drain"))
    for each in drained:
        each.results(timeout_s=timeout_s + _DRAIN_ANSWER_TIMEOUT_S)
