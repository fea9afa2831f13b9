"""Runs a rendered RayService on this machine as KubeRay does: Ray's head, then Serve.

`ray start` gets the flags that KubeRay derives from a head group (ray-project/kuberay,
controllers/ray/common/pod.go), and serveConfigV2 is sent to the same endpoint. Volume paths are
replaced by directories of the test, and ports by free ones; nothing else is changed.
"""

from __future__ import annotations

import base64
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.conftest import free_ports
from tests.k8s.rendering import Objects, cluster, of_kind, ray_templates, serve_config

START_TIMEOUT_S = 300.0
BIN = Path(sys.executable).parent

KEPT_PATHS = ("/tmp", "/tmp/ray")
"""Mounted in pods since their root is read-only; unchanged on this machine."""


@dataclass(frozen=True)
class HeadPod:
    """The container of the head pod, as it runs on this machine.

    paths: mount paths to directories here. ports: by name of the listener.
    """

    container: Mapping[str, Any]
    paths: Mapping[str, str]
    ports: Mapping[str, int]
    environment: Mapping[str, str]

    def moved(self, content: Any) -> Any:
        """Replace the container's paths by those of this machine in all strings, at any depth."""
        if isinstance(content, str):
            for path, here in self.paths.items():
                content = content.replace(path, here)
            return content
        if isinstance(content, dict):
            return {key: self.moved(each) for key, each in content.items()}
        if isinstance(content, list):
            return [self.moved(each) for each in content]
        return content

    def url(self, name: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}{path}"

    def run(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the container's environment."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s
        )

    def hook(self) -> list[str]:
        """Return the preStop command, with the ports of this machine."""
        command = list(self.container["lifecycle"]["preStop"]["exec"]["command"])
        script = command[-1].replace(":8265", f":{self.ports['dashboard']}")
        return [*command[:-1], script.replace("/8000", f"/{self.ports['http']}")]


@contextmanager
def running_head(objects: Objects, directory: Path) -> Iterator[HeadPod]:
    """Run Ray's head with the container's environment and volumes, then deploy the applications."""
    pod = _head_pod(objects, directory)
    with (directory / "log").open("wb") as log:
        popen = subprocess.Popen(
            _start_command(objects, pod, directory), env=pod.environment, stdout=log, stderr=log
        )
    try:
        _wait_for(lambda: _answers(pod.url("agent", "/api/healthz")), popen, directory / "log")
        _submit(objects, pod)
        _wait_for(lambda: _are_running(pod), popen, directory / "log")
        yield pod
    finally:
        _stop(popen)


def _head_pod(objects: Objects, directory: Path) -> HeadPod:
    [container] = ray_templates(objects)["head"]["spec"]["containers"]
    names = ("gcs", "dashboard", "agent", "client", "metrics", "http", "grpc")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    paths = _volumes(objects, container, directory)
    pod = HeadPod(container, paths, ports, {})
    own = {each["name"]: str(pod.moved(each["value"])) for each in container["env"]}
    added = {  # added by KubeRay
        "RAY_AUTH_MODE": cluster(objects)["authOptions"]["mode"],
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"127.0.0.1:{ports['gcs']}",
        "RAY_PORT": str(ports["gcs"]),
    }
    here = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd())}
    return HeadPod(container, paths, ports, own | added | here)


def _volumes(objects: Objects, container: Mapping[str, Any], directory: Path) -> dict[str, str]:
    template = ray_templates(objects)["head"]["spec"]
    volumes = {each["name"]: each for each in template["volumes"]}
    paths = {}
    for mount in container["volumeMounts"]:
        if mount["mountPath"] in KEPT_PATHS:
            continue
        place = directory / "volumes" / mount["name"]
        place.mkdir(parents=True)
        paths[mount["mountPath"]] = str(place)
        if secret := volumes[mount["name"]].get("secret"):
            _write_secret(objects, secret["secretName"], place)
    return paths


def _write_secret(objects: Objects, name: str, place: Path) -> None:
    [secret] = [each for each in of_kind(objects, "Secret") if each["metadata"]["name"] == name]
    for key, value in secret["data"].items():
        (place / key).write_bytes(base64.b64decode(value))


def _start_command(objects: Objects, pod: HeadPod, directory: Path) -> list[str]:
    params = dict(cluster(objects)["headGroupSpec"]["rayStartParams"])
    limits = pod.container["resources"]["limits"]
    params.setdefault("num-cpus", str(limits["cpu"]))
    of_this_machine = {
        "port": pod.ports["gcs"],
        "dashboard-port": pod.ports["dashboard"],
        "dashboard-agent-listen-port": pod.ports["agent"],
        "ray-client-server-port": pod.ports["client"],
        "metrics-export-port": pod.ports["metrics"],
        "temp-dir": directory / "ray",
        "object-store-memory": 100_000_000,
        "node-ip-address": "127.0.0.1",
    }
    flags = [f"--{name}={value}" for name, value in {**params, **of_this_machine}.items()]
    return [str(BIN / "ray"), "start", "--head", "--block", *flags]


def _submit(objects: Objects, pod: HeadPod) -> None:
    config = pod.moved(serve_config(objects))
    config["http_options"]["port"] = pod.ports["http"]
    config["grpc_options"]["port"] = pod.ports["grpc"]
    url = pod.url("dashboard", "/api/serve/applications/")
    # The answer waits until Serve's controller has started: seconds, more on a loaded machine.
    answer = httpx.put(url, json=config, headers=_token(pod), timeout=60)
    assert answer.status_code == 200, answer.text


def _are_running(pod: HeadPod) -> bool:
    answer = httpx.get(
        pod.url("dashboard", "/api/serve/applications/"), headers=_token(pod), timeout=30
    )
    found = {name: each["status"] for name, each in answer.json()["applications"].items()}
    assert "DEPLOY_FAILED" not in found.values(), answer.text
    return bool(found) and set(found.values()) == {"RUNNING"}


def _token(pod: HeadPod) -> dict[str, str]:
    return {"Authorization": f"Bearer {pod.environment['RAY_AUTH_TOKEN']}"}


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url).status_code == 200
    return False


def _wait_for(condition: Any, popen: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert popen.poll() is None, log.read_text()[-5000:]
        assert time.monotonic() < deadline_s, log.read_text()[-5000:]
        time.sleep(0.5)


def _stop(popen: subprocess.Popen[bytes]) -> None:
    started = psutil.Process(popen.pid).children(recursive=True) if popen.poll() is None else []
    popen.send_signal(signal.SIGTERM)  # as the kubelet does after the preStop hook
    try:
        popen.wait(120)
        psutil.wait_procs(started, timeout=10)
    finally:
        for each in started:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        if popen.poll() is None:
            popen.kill()
