"""Deploys a Serve config file with Ray's `serve run`, on a separate Ray."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.e2e.conftest import START_TIMEOUT_S, RunningService, free_ports

STOP_TIMEOUT_S = 60.0


@contextmanager
def served(config: dict[str, Any], log: Path) -> Iterator[RunningService]:
    """Run the service on free ports; stop it with SIGINT, and kill processes that are left."""
    grpc_port, http_port = free_ports(2)
    config["http_options"] |= {"host": "127.0.0.1", "port": http_port}
    config["grpc_options"]["port"] = grpc_port
    file = log.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    with log.open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(file)],
            stdout=output,
            stderr=output,
            env=_environment(),
        )
    process = psutil.Process(popen.pid)
    url = f"http://127.0.0.1:{http_port}"
    try:
        for application in config["applications"]:
            prefix = application["route_prefix"].rstrip("/")
            _wait_until_ready(f"{url}{prefix}/ready", popen, log)
        yield RunningService(process, f"127.0.0.1:{grpc_port}", url, log)
    finally:
        _stop(popen, process)


def _environment() -> dict[str, str]:
    """Return an environment for a separate Ray: no configured cluster, and a new token."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return environment | token | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path.cwd())}


def _wait_until_ready(url: str, popen: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_ready(url):
        assert popen.poll() is None, f"it ended: {log.read_text()[-5000:]}"
        assert time.monotonic() < deadline, f"{url} is not ready: {log.read_text()[-5000:]}"
        time.sleep(0.5)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _stop(popen: subprocess.Popen[bytes], process: psutil.Process) -> None:
    started = process.children(recursive=True) if popen.poll() is None else []
    popen.send_signal(signal.SIGINT)
    try:
        popen.wait(STOP_TIMEOUT_S)
    finally:
        for each in [*started, process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
