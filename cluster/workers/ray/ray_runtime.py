"""A private Ray of one program, on this machine, protected by a token."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psutil

from cluster.workers.ray.ray_internals import (
    local_node,
    node_processes,
    reload_authentication,
    vital_processes,
)
from specdec.config.hardware import available_cpus

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100 * 2**20  # steps do not use it
_EXIT_TIMEOUT_S = 5.0
_MAX_STARTS = 3
_MAX_DIRECTORY_BYTES = 36
"""Ray appends up to 71: /ray/session_DATE_TIME_MICROSECONDS_PID/sockets/plasma_store."""

_SLOW_START = "timed out during startup"

RAY_ENVIRONMENT = MappingProxyType(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Keep an idle service idle: by default these loops run ten times a second. A start waits
        # for two or three rounds of the first one.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
        # With autoscaling, several reports must fall into the look-back period.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2.0",
        "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # so that the next line applies
        "LOG_NAME_UPDATE_INTERVAL_S": "1.0",
        "RAY_raylet_report_resources_period_milliseconds": "1000",
        "RAY_health_check_period_ms": "10000",
        "RAY_memory_monitor_refresh_ms": "1000",
        "REPORTER_UPDATE_INTERVAL_MS": "60000",  # of statistics that are not used here
        "RAY_enable_metrics_collection": "0",
        "RAY_event_stats": "0",
        # By default Ray's workers have a lower priority than every other process.
        "RAY_worker_niceness": "0",
        # Log lines name their source, and each must appear unchanged.
        "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
        "RAY_DEDUP_LOGS": "0",
    }
)
"""Defaults for every Ray that a service runs on; variables that are set already take precedence."""


def prepare_environment() -> None:
    """Set the variables that are not set; before Ray is imported, whose processes inherit them."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class LocalRay:
    """A Ray that this process has started.

    node: Ray's record of its processes. token: its file. before: the variables that were set for
    it, as they were before; None if unset.
    """

    node: Any
    token: TokenFile
    before: Mapping[str, str | None]

    def processes(self) -> list[psutil.Process]:
        """Return its running processes, workers included; only before it is shut down."""
        found: list[psutil.Process] = []
        for popen in node_processes(self.node):
            with suppress(psutil.NoSuchProcess):
                if popen.poll() is None:
                    process = psutil.Process(popen.pid)
                    found += [process, *process.children(recursive=True)]
        return found

    def vital_processes(self) -> dict[str, int]:
        """Return the pids of the processes without which Ray does not go on."""
        return {name: found.pid for name, found in vital_processes(self.node).items()}

    def stop(self) -> None:
        """End it, unless the program has already, and restore the variables."""
        present = local_node()
        if present is None or present is self.node:  # otherwise the program has started another one
            stop_ray(self.processes())
            self.restore_environment()

    def restore_environment(self) -> None:
        """Restore the authentication variables for the next Ray that the process uses."""
        _authenticate(self.before)
        self.token.close()


class TokenFile:
    """A token in a file that only processes of the same user can read.

    Environment variables, which every process of Ray inherits, contain its path only. On Linux it
    is in memory and ends with this process.
    """

    def __init__(self) -> None:
        """Make a random token."""
        if sys.platform == "linux":
            self._file = os.fdopen(os.memfd_create("ray-token"), "w")
            self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile("w", prefix="ray-token-")  # noqa: SIM115
            self.path = self._file.name
        self._file.write(secrets.token_hex(32))
        self._file.flush()

    def close(self) -> None:
        """Remove it."""
        self._file.close()


def start_ray() -> LocalRay:
    """Start it. Sets environment variables of this process, which Ray's processes inherit."""
    prepare_environment()
    token = TokenFile()
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token.path,
        "RAY_AUTH_TOKEN": None,  # would take precedence
        **_short_directory(),
    }
    before = {name: os.environ.get(name) for name in variables}
    _authenticate(variables)
    import ray  # reads the environment when it is imported

    def start() -> None:
        ray.init(
            address="local",
            num_cpus=available_cpus(),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=True,  # log lines of the Router and the workers appear here
            logging_level=logging.ERROR,
        )

    try:
        _retry(start)
    except BaseException:
        _authenticate(before)
        token.close()
        raise
    return LocalRay(local_node(), token, before)


def _short_directory() -> dict[str, str]:
    """Return the variable with the directory of Ray's files, if that has no room for its sockets.

    The path of a socket has at most 107 bytes, and those of TMPDIR in jobs and tests are long.
    """
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    directory = os.environ.get(name, "")
    if len(os.fsencode(directory)) <= _MAX_DIRECTORY_BYTES:
        return {}
    limit = f"at most {_MAX_DIRECTORY_BYTES} bytes, as the paths of sockets are limited"
    logger.warning("%s=%s is too long for Ray (%s): its files are in /tmp", name, directory, limit)
    return {"RAY_TMPDIR": "/tmp"}  # where Ray's files are by default


def _retry(start: Callable[[], object]) -> None:
    """Start Ray, again where its node is not up in the 30 s that Ray allows, on a busy machine."""
    for attempts_left in reversed(range(_MAX_STARTS)):
        before = set(psutil.Process().children())
        try:
            start()
            return
        except Exception as error:
            if attempts_left == 0 or _SLOW_START not in str(error):
                raise
            logger.warning("Ray did not start within 30 s; starting it again")
            _kill_ray(set(psutil.Process().children()) - before)  # Ray itself has no record of them


def _kill_ray(children: set[psutil.Process]) -> None:
    """Kill those children that are processes of Ray, and theirs."""
    for child in children:
        with suppress(psutil.NoSuchProcess):
            if any("/ray/" in word for word in child.cmdline()):
                for each in (child, *child.children(recursive=True)):
                    each.kill()


def _authenticate(variables: Mapping[str, str | None]) -> None:
    """Set the variables, and let Ray read them again."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    reload_authentication()


def stop_ray(processes: list[psutil.Process]) -> None:
    """Shut Ray down, and kill those of its `processes` that remain."""
    import ray

    ray.shutdown()
    _, remaining = psutil.wait_procs(processes, timeout=_EXIT_TIMEOUT_S)
    for process in remaining:
        process.kill()
