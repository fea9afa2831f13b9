"""A Ray of one program's own, on this machine, closed to whoever lacks its token."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import psutil

from specdec.config.hardware import available_cpus

_OBJECT_STORE_BYTES = 100 * 2**20  # steps do not travel through it
_EXIT_TIMEOUT_S = 5.0

RAY_ENVIRONMENT = MappingProxyType(
    {
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
)
"""Of every Ray that a service runs on, where nobody has set it otherwise."""


def prepare_environment() -> None:
    """Sets what is not set; before Ray is imported, whose processes get all of it."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class LocalRay:
    """A Ray that this process has started.

    node: Ray's own record of its processes. before: what its variables were, None where unset.
    """

    node: Any
    before: Mapping[str, str | None]

    def processes(self) -> list[psutil.Process]:
        """All of it that runs, its workers included; to be asked before it is shut down."""
        started = [each.process for each in chain(*self.node.all_processes.values())]
        found: list[psutil.Process] = []
        for popen in started:
            with suppress(psutil.NoSuchProcess):
                if popen.poll() is None:
                    process = psutil.Process(popen.pid)
                    found += [process, *process.children(recursive=True)]
        return found

    def stop(self) -> None:
        """Ends it, unless the program has, and gives the variables back."""
        present = _present_node()
        if present is None or present is self.node:  # else the program has started another one
            stop_ray(self.processes())
            self.restore_environment()

    def restore_environment(self) -> None:
        """Has this process be what it was before, for the next Ray that it starts or joins."""
        _authenticate(self.before)


def start_ray() -> LocalRay:
    """Starts it. Sets variables of this process's environment, of which Ray's processes get all."""
    prepare_environment()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in token}
    _authenticate(token)
    import ray  # reads the environment when it is imported

    try:
        ray.init(
            address="local",
            num_cpus=available_cpus(),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=True,  # what the Router and the shards log appears here
            logging_level=logging.ERROR,
        )
    except BaseException:
        _authenticate(before)
        raise
    return LocalRay(_present_node(), before)


def _present_node() -> Any:
    """Ray's record of the one that this process has started; None where it has not."""
    from ray._private import worker

    return worker._global_node


def _authenticate(variables: Mapping[str, str | None]) -> None:
    """Sets them, and has Ray read them: it keeps what they were when it was imported or asked."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    from ray._raylet import (  # type: ignore[attr-defined]  # they are in no stub
        AuthenticationTokenLoader,
        Config,
    )

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def stop_ray(processes: list[psutil.Process]) -> None:
    """Shuts it down, and ends those of its `processes` that are left then."""
    import ray

    ray.shutdown()
    _, left_over = psutil.wait_procs(processes, timeout=_EXIT_TIMEOUT_S)
    for process in left_over:
        process.kill()
