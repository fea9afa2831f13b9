"""Tests of a real Prometheus that scrapes two replicas with a draft model and a LoRA adapter."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

pytest.importorskip(
    "grafana_foundation_sdk", reason="needs grafana-foundation-sdk: pip install -e '.[dev]'"
)

from cluster.observability.metric_definitions import (
    CONNECTION_METRICS,
    FLEET_METRICS,
    REPLICA_METRICS,
)
from specdec.client import AdminClient, Client, ClientError, SpeculationChange
from specdec.types.sampling.sampling_params import SamplingParams
from tests.cluster.scraped import families, samples
from tests.e2e.conftest import running_service
from tests.e2e.prometheus_server import DEPLOY, running_prometheus
from tests.specdec.adapters import adapter_dir
from tools.monitoring.files import DASHBOARD

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed (Debian: apt-get install prometheus)",
    ),
]

NUM_STREAMS = 4
NUM_TOKENS = 48
PROMPT = [5, 6, 7, 8] * 6
WINDOW = "15s"
MODEL = "monitored"
PANELS_OF_HEADS = ("Acceptance rate by version", "Acceptance length by version", "Head probe")
"""Panels without data where no draft head is loaded."""


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    """Start two replicas, so that one Router must report the metrics of another."""
    root = tmp_path_factory.mktemp("monitored")
    draft = {"method": "draft_model", "model": str(tiny_model_dir), "num_speculative_tokens": 3}
    draft["async_drafting"] = "continuing"
    flags = ["--speculative-config", json.dumps(draft), "--served-model-name", MODEL]
    flags += ["--ingress", "serve", "--num-replicas", "2", "--max-model-len", "256"]
    adapter = adapter_dir(root / "adapter", tiny_model_dir, seed=0)
    flags += ["--enable-lora", "--lora-modules", f"adapted={adapter}"]
    log = root / "log"
    with running_service(tiny_model_dir, log, *flags) as service:
        with AdminClient(service.grpc_address) as admin:  # also where drafts are slower
            admin.set_speculation(SpeculationChange(mode="on"))
        yield service


class Load:
    """Load of several streams, half of them with an adapter, each with one request at a time."""

    def __init__(self, address):
        self.address = address
        self.is_over = threading.Event()

    def generate(self, model):
        """Return the numbers of generated and of accepted draft tokens at the end of the load."""
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        tokens = accepted = 0
        with Client(self.address, timeout_s=60) as client:
            while not self.is_over.is_set():
                usage = client.generate(PROMPT, params, model=model).usage
                tokens += usage.completion_tokens
                accepted += usage.speculation.num_accepted_tokens
        return tokens, accepted

    def send_invalid(self):
        """Send a request that the service rejects."""
        with Client(self.address) as client, suppress(ClientError):
            client.generate([10**9], SamplingParams(max_tokens=1))


@contextmanager
def running(load):
    """Yield a future per stream; each resolves to its token counts when the load ends."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        models = [MODEL, "adapted"] * (NUM_STREAMS // 2)
        streams = [pool.submit(load.generate, model) for model in models]
        try:
            yield streams
        finally:
            load.is_over.set()


def scrape(service, path="/metrics"):
    response = httpx.get(service.http_url + path)
    return response.text if response.status_code == 200 else ""


def replicas(text):
    return sorted(
        {
            sample.labels["replica"]
            for family in families(text).values()
            for sample in family.samples
            if "replica" in sample.labels
        }
    )


def total(service, name):
    """Return the sum of a metric over both replicas."""
    text = scrape(service)
    return sum(samples(text, replica).get((name,), 0) for replica in replicas(text))


def wait_until(condition, timeout_s=30):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.2)


def panel_queries():
    """Return the queries by panel and legend, but those of heads, with values for variables."""
    dashboard = json.loads((DEPLOY / DASHBOARD).read_text())
    variables = {"$__rate_interval": WINDOW, "$model_name": MODEL, "$replica": ".*"}
    queries = {}
    panels = {panel["title"]: panel.get("targets", []) for panel in dashboard["panels"]}
    for title in panels.keys() - set(PANELS_OF_HEADS):
        for target in panels[title]:
            expr = target["expr"]
            for name, value in variables.items():
                expr = expr.replace(name, value)
            queries[title, target["legendFormat"]] = expr
    return queries


def test_every_panels_query_returns_data(service, tmp_path):
    load = Load(service.grpc_address)
    target = service.http_url.removeprefix("http://")
    with running_prometheus(target, tmp_path) as prometheus, running(load):
        load.send_invalid()
        left = panel_queries()
        deadline_s = time.monotonic() + 60
        while left:
            left = {key: expr for key, expr in left.items() if not prometheus.query(expr)}
            assert time.monotonic() < deadline_s, f"no data: {left}"
            load.send_invalid()
            time.sleep(1)
        rules = prometheus.get("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
        assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
        assert len(prometheus.query("specdec:replica_ready == 1")) == 2
        assert prometheus.query("count(specdec:control_plane_up)") == [1]


def test_the_service_exposes_exactly_the_defined_metrics(service):
    of_fleet = {each.name: each.type for each in (*REPLICA_METRICS, *FLEET_METRICS)}
    of_replica = {each.name: each.type for each in (*REPLICA_METRICS, *CONNECTION_METRICS)}
    for path, expected in (("/metrics", of_fleet), ("/metrics/replica", of_replica)):
        found = families(scrape(service, path))
        assert {name: family.type for name, family in found.items()} == expected
    assert len(replicas(scrape(service))) == 2
    assert len(replicas(scrape(service, "/metrics/replica"))) == 1


def test_the_counters_of_both_replicas_sum_to_the_usage_of_clients(service):
    names = ("generation_tokens_total", "spec_decode_num_accepted_tokens_total")
    time.sleep(1.5)  # reports of earlier requests arrive within a second
    before = [total(service, name) for name in names]
    load = Load(service.grpc_address)
    with running(load) as streams:
        time.sleep(3)
    used = [sum(column) for column in zip(*(stream.result() for stream in streams), strict=True)]
    assert used[0] > 0
    # The replica that does not serve the scrape reports within a second.
    wait_until(
        lambda: (
            [total(service, name) for name in names] == [*map(sum, zip(before, used, strict=True))]
        ),
        5,
    )


def test_fleet_metrics_are_unavailable_without_the_control_plane(service):
    [plane] = [each for each in service.descendants() if "ControlPlane" in command_of(each)]
    plane.kill()
    wait_until(lambda: httpx.get(f"{service.http_url}/metrics").status_code == 503, 10)
    text = scrape(service, "/metrics/replica")
    [replica] = replicas(text)
    assert samples(text, replica)["replica_ready",] == 1
    wait_until(lambda: len(replicas(scrape(service))) == 2)


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has just ended
        return ""
