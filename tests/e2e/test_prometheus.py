"""A real Prometheus asks two replicas with a draft model all that the dashboard wants to know."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

from cluster.observability.metric_definitions import FLEET_METRICS, LINK_METRICS, REPLICA_METRICS
from specdec.client import AdminClient, Client, ClientError, SpeculationChange
from specdec.types.sampling_params import SamplingParams
from tests.cluster.scraped import families, samples
from tests.e2e.conftest import running_service
from tests.e2e.prometheus_server import DEPLOY, running_prometheus
from tools.monitoring.files import DASHBOARD

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),
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


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    """Two replicas, so that one Router has to tell of another."""
    draft = {"method": "draft_model", "model": str(tiny_model_dir), "num_speculative_tokens": 3}
    flags = ["--speculative-config", json.dumps(draft), "--served-model-name", MODEL]
    flags += ["--ingress", "serve", "--num-replicas", "2", "--max-model-len", "256"]
    log = tmp_path_factory.mktemp("monitored") / "log"
    with running_service(tiny_model_dir, log, *flags) as service:
        with AdminClient(service.grpc_address) as admin:  # whether drafts pay here or not
            admin.set_speculation(SpeculationChange(mode="on"))
        yield service


class Load:
    """Requests, one after another on each of several streams, and what they brought."""

    def __init__(self, address):
        self.address = address
        self.is_over = threading.Event()

    def ask(self):
        """Tokens generated and draft tokens accepted, until the load is over."""
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        tokens = accepted = 0
        with Client(self.address, timeout_s=60) as client:
            while not self.is_over.is_set():
                usage = client.generate(PROMPT, params).usage
                tokens += usage.completion_tokens
                accepted += usage.speculation.num_accepted_tokens
        return tokens, accepted

    def refuse(self):
        """A call that is refused."""
        with Client(self.address) as client, suppress(ClientError):
            client.generate([10**9], SamplingParams(max_tokens=1))


@contextmanager
def running(load):
    """Yields what will hold each stream's yield once the load is over."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(load.ask) for _ in range(NUM_STREAMS)]
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
    """Over both replicas."""
    text = scrape(service)
    return sum(samples(text, replica).get((name,), 0) for replica in replicas(text))


def wait_until(condition, timeout_s=30):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.2)


def panel_queries():
    """By panel and legend, with Grafana's variables filled in."""
    dashboard = json.loads((DEPLOY / DASHBOARD).read_text())
    variables = {"$__rate_interval": WINDOW, "$model_name": MODEL, "$replica": ".*"}
    queries = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"]
            for name, value in variables.items():
                expr = expr.replace(name, value)
            queries[panel["title"], target["legendFormat"]] = expr
    return queries


def test_every_panels_query_returns_data(service, tmp_path):
    load = Load(service.grpc_address)
    target = service.http_url.removeprefix("http://")
    with running_prometheus(target, tmp_path) as prometheus, running(load):
        load.refuse()
        left = panel_queries()
        deadline_s = time.monotonic() + 60
        while left:
            left = {key: expr for key, expr in left.items() if not prometheus.query(expr)}
            assert time.monotonic() < deadline_s, f"no data: {left}"
            load.refuse()
            time.sleep(1)
        rules = prometheus.ask("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
        assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
        assert len(prometheus.query("specdec:replica_ready == 1")) == 2
        assert prometheus.query("count(specdec:control_plane_up)") == [1]


def test_the_running_service_exposes_the_catalogue_and_nothing_else(service):
    of_fleet = {each.name: each.type for each in (*REPLICA_METRICS, *FLEET_METRICS)}
    of_replica = {each.name: each.type for each in (*REPLICA_METRICS, *LINK_METRICS)}
    for path, expected in (("/metrics", of_fleet), ("/metrics/replica", of_replica)):
        found = families(scrape(service, path))
        assert {name: family.type for name, family in found.items()} == expected
    assert len(replicas(scrape(service))) == 2
    assert len(replicas(scrape(service, "/metrics/replica"))) == 1


def test_both_replicas_together_have_counted_what_clients_were_told(service):
    names = ("generation_tokens_total", "spec_decode_num_accepted_tokens_total")
    time.sleep(1.5)  # what was said before is a second old at most
    before = [total(service, name) for name in names]
    load = Load(service.grpc_address)
    with running(load) as streams:
        time.sleep(3)
    told = [sum(column) for column in zip(*(stream.result() for stream in streams), strict=True)]
    assert told[0] > 0
    # The replica that does not answer has reported within a second.
    wait_until(
        lambda: (
            [total(service, name) for name in names] == [*map(sum, zip(before, told, strict=True))]
        ),
        5,
    )


def test_while_the_control_plane_is_away_the_fleet_is_not_told_of(service):
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
    except psutil.Error:  # it has just ended
        return ""
