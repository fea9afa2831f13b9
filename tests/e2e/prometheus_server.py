"""Prometheus server for tests, with the scrape configuration under deploy/."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.conftest import free_ports
from tools.monitoring.files import RULES, SCRAPE

DEPLOY = Path(__file__).parents[2] / "deploy"
INTERVAL = "1s"


@dataclass(frozen=True)
class RunningPrometheus:
    url: str

    def query(self, expr: str) -> list[float]:
        """Return the current value of each series of an expression, without NaN."""
        found = self.get("query", query=expr)["result"]
        values = [float(series["value"][1]) for series in found]
        return [value for value in values if not math.isnan(value)]

    def get(self, path: str, **params: str) -> Any:
        body = httpx.get(f"{self.url}/api/v1/{path}", params=params).json()
        assert body["status"] == "success", body
        return body["data"]


@contextmanager
def running_prometheus(target: str, directory: Path) -> Iterator[RunningPrometheus]:
    """Run Prometheus for the block. target: host:port of the service's HTTP interface."""
    config = yaml.safe_load((DEPLOY / SCRAPE).read_text())
    config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = [str(DEPLOY / RULES)]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [target]}]
    path = directory / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    command = [
        "prometheus",
        f"--config.file={path}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        popen = subprocess.Popen(command, stdout=log, stderr=log)
    prometheus = RunningPrometheus(f"http://127.0.0.1:{port}")
    try:
        _wait_until_ready(prometheus, directory / "prometheus.log")
        yield prometheus
    finally:
        popen.terminate()
        popen.wait(20)


def _wait_until_ready(prometheus: RunningPrometheus, log: Path) -> None:
    deadline_s = time.monotonic() + 30
    while True:
        try:
            if httpx.get(f"{prometheus.url}/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.2)
