"""`specdec endpoint-picker`: its flags, its end, and what it does not import."""

import re
import signal
import subprocess
import sys
import time

import httpx
import pytest
from click.testing import CliRunner

from cluster.api.endpoint_picker import server
from cluster.api.endpoint_picker.certificates import self_signed
from cluster.api.endpoint_picker.scraper import ScrapeConfig
from cluster.api.endpoint_picker.server import PickerConfig
from cluster.cli.main import main
from tests.e2e.conftest import free_ports

COMMAND = [sys.executable, "-m", "cluster", "endpoint-picker"]


@pytest.fixture
def served(monkeypatch):
    """Return the configurations with which the command would serve."""
    configs = []

    async def serve(config):
        configs.append(config)

    monkeypatch.setattr(server, "serve", serve)
    return configs


def test_flags_become_settings(served, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_API_KEY", "key")
    (tmp_path / "ca").write_bytes(self_signed()[1])
    flags = "--endpoints 10.0.0.1:1,10.0.0.2:2 --metrics-path /metrics --host 0.0.0.0 "
    flags += "--scrape-interval-ms 50 --port 5 --metrics-port 6 --health-port 8 --max-waiting 7 "
    flags += "--num-fallbacks 2 --drain-timeout-s 9 "
    flags += f"--tls-self-signed --endpoint-ca-file {tmp_path / 'ca'} --log-level error"
    flags = [*flags.split(), "--slo", "ttft:2000 tpot:40"]
    done = CliRunner().invoke(main, ["endpoint-picker", *flags])
    assert done.exit_code == 0, done.output
    scrape = ScrapeConfig(0.05, "/metrics", str(tmp_path / "ca"), "key")
    assert served == [
        PickerConfig(
            endpoints=("10.0.0.1:1", "10.0.0.2:2"),
            scrape=scrape,
            host="0.0.0.0",
            port=5,
            metrics_port=6,
            health_port=8,
            max_waiting=7,
            num_fallbacks=2,
            drain_timeout_s=9.0,
            slo="ttft:2000 tpot:40",
            tls_self_signed=True,
        )
    ]


def test_it_listens_on_loopback_by_default(served, monkeypatch):
    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)
    flags = ["--pod-selector", "app=chat", "--pod-port", "9", "--namespace", "llm"]
    CliRunner().invoke(main, ["endpoint-picker", *flags])
    assert served == [PickerConfig(pod_selector="app=chat", pod_port=9, namespace="llm")]
    assert served[0].host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "endpoints is ''; it must be given, or else a pod selector, and not both"),
        (["--endpoints", "a"], "endpoints is 'a'; it must be IP:PORT"),
        (["--endpoints", "10.0.0.1:1", "--pod-selector", "a=b"], "and not both"),
        (
            ["--endpoints", "10.0.0.1:1", "--slo", "2 s"],
            "slo is '2 s'; it must be ttft and tpot in milliseconds",
        ),
    ],
)
def test_mistakes_are_reported_in_a_line(flags, message):
    done = CliRunner().invoke(main, ["endpoint-picker", *flags])
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.count("\n") == 1


def test_it_serves_until_it_is_stopped_without_ray_torch_and_fastapi():
    port, metrics_port, dead = free_ports(3)
    command = [*COMMAND, "--endpoints", f"127.0.0.1:{dead}", "--port", str(port)]
    command[1:1] = ["-X", "importtime"]
    command += ["--metrics-port", str(metrics_port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        try:
            url = f"http://127.0.0.1:{metrics_port}/metrics"
            text = until_answered(url)
            assert f'endpoint_up{{endpoint="127.0.0.1:{dead}"}} 0.0' in text
            taken = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            assert taken.returncode == 2
            assert f"port is {port}; it must be a free port of 127.0.0.1" in taken.stderr
        finally:
            popen.send_signal(signal.SIGTERM)
            output = popen.stderr.read()
        assert popen.wait(10) == 0, output
    imported = {name.split(".")[0] for name in re.findall(r"\| +([\w.]+)$", output, re.MULTILINE)}
    assert "grpc" in imported
    assert not imported & {"ray", "torch", "fastapi", "transformers", "numpy"}


def until_answered(url):
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        try:
            return httpx.get(url).text
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(url)
