"""Tests the rendered objects on a real Ray: head, applications, `helm test` and preStop hook."""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import promql_parser
import pytest
import yaml

from specdec.client import Client, ClientError
from specdec.types.sampling.sampling_params import SamplingParams
from tests.cluster.scraped import families
from tests.k8s.kuberay import running_head
from tests.k8s.rendering import example, of_kind, only, render
from tests.specdec.tiny import tiny_llama_dir

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DRAIN_S = 10
SETTINGS = {"max_model_len": 2048}
NUM_TOKENS = 1000


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The laptop example with two tiny models and all monitoring."""
    tiny_model_dir = tiny_llama_dir(tmp_path_factory.mktemp("model"), max_positions=2048)
    values = example("laptop")
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    values["models"] = [
        {
            "name": "chat",
            "model": str(tiny_model_dir),
            "speculativeConfig": speculation,
            "settings": SETTINGS,
        },
        {
            "name": "Org/plain",
            "model": str(tiny_model_dir),
            "speculativeConfig": "none",
            "settings": SETTINGS,
        },
    ]
    values["tests"] = {"expectedSpeculation": {"mode": ""}, "maxTokens": 8}
    values["monitoring"] = {"rules": {"enabled": True}, "serviceMonitor": {"enabled": True}}
    return render(values)


@pytest.fixture(scope="module")
def pod(objects, tmp_path_factory):
    with running_head(objects, tmp_path_factory.mktemp("head")) as running:
        yield running


def plan_of(objects, pod):
    """Return the plan of `helm test`, with addresses of this machine."""
    plan = pod.moved(json.loads(only(objects, "ConfigMap", "-test")["data"]["plan.json"]))
    return plan | {
        "http_url": f"http://127.0.0.1:{pod.ports['http']}",
        "grpc_address": f"127.0.0.1:{pod.ports['grpc']}",
    }


def helm_test(objects, pod, plan, directory):
    """Run the command of the test pod with its two files."""
    [container] = only(objects, "Pod", "-test")["spec"]["containers"]
    files = only(objects, "ConfigMap", "-test")["data"] | {"plan.json": json.dumps(plan)}
    for name, text in files.items():
        (directory / name).write_text(text)
    _, *paths = container["command"]
    here = [path.replace("/etc/specdec/test", str(directory)) for path in paths]
    return pod.run([sys.executable, *here], timeout_s=120)


def test_the_probes_need_no_token(pod):
    probes = {name: pod.container[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    for probe in probes.values():
        assert probe["port"] == 52365
        assert httpx.get(pod.url("agent", probe["path"])).status_code == 200
    assert httpx.get(pod.url("http", "/-/healthz")).status_code == 200


def test_ray_rejects_requests_without_its_token(pod):
    assert httpx.get(pod.url("dashboard", "/api/serve/applications/")).status_code == 401


def test_helm_test_passes(objects, pod, tmp_path):
    found = helm_test(objects, pod, plan_of(objects, pod), tmp_path)
    assert found.returncode == 0, found.stderr
    assert "chat, Org/plain" in found.stdout


def test_helm_test_fails_if_speculation_is_not_as_configured(objects, pod, tmp_path):
    plan = plan_of(objects, pod)
    plan["models"][0] |= {"num_speculative_tokens": 5, "mode": "off"}
    found = helm_test(objects, pod, plan, tmp_path)
    assert found.returncode == 1
    assert "chat: num_speculative_tokens is 3 (expected 5)" in found.stderr
    assert "chat: the mode of speculation is auto (expected off)" in found.stderr


def test_both_interfaces_require_the_key(pod):
    body = {"model": "chat", "prompt": "a", "max_tokens": 1}
    assert httpx.post(pod.url("http", "/v1/completions"), json=body).status_code == 401
    assert httpx.get(pod.url("http", "/v1/admin/speculation")).status_code == 401
    with Client(f"127.0.0.1:{pod.ports['grpc']}", timeout_s=30) as client:
        for model in ("chat", "Org/plain", "unknown"):
            with pytest.raises(ClientError) as caught:
                client.generate("a", model=model)
            assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED


def test_the_scraped_endpoints_export_the_metrics_of_the_alerts(objects, pod):
    exposed = set()
    for endpoint in only(objects, "ServiceMonitor")["spec"]["endpoints"]:
        answer = httpx.get(pod.url("http", endpoint["path"]))
        assert answer.status_code == 200, endpoint
        for family in families(answer.text).values():
            exposed |= {sample.name for sample in family.samples}
    rules = only(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
    keda = render({**example("several-models")})
    queries = [rule["expr"] for rule in rules] + [
        trigger["metadata"]["query"]
        for each in of_kind(keda, "ScaledObject")
        for trigger in each["spec"]["triggers"]
    ]
    # Not exported here: no draft model is loaded, and nothing has failed.
    asked = set().union(*map(metrics_of, queries)) - {"up", "specdec:draft_worker_up"}
    assert {name for name in asked if name not in exposed} <= ABSENT_UNTIL_COUNTED


ABSENT_UNTIL_COUNTED = {"specdec:speculation_estimated_speedup"}
"""Not exported without a cost table."""


def metrics_of(query):
    names = set()

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            names.add(node.name)

    promql_parser.walk(promql_parser.parse(query), visit)
    return names


def test_running_requests_finish_when_the_pod_stops(objects, pod):
    """Last in this file, since it stops the service."""

    def stream():
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        key = yaml.safe_load(Path(plan_of(objects, pod)["api_keys_file"]).read_text())[0]["key"]
        with Client(f"127.0.0.1:{pod.ports['grpc']}", timeout_s=60, api_key=key) as client:
            chunks = client.generate_stream([5, 6, 7], params, model="chat", resume=False)
            num_tokens = len(next(chunks).token_ids)
            has_begun.set()
            num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
            return num_tokens, time.monotonic()

    has_begun = threading.Event()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(stream)
        assert has_begun.wait(30)
        began_s = time.monotonic()
        hook = pod.run(pod.hook(), timeout_s=DRAIN_S + 60)
        num_tokens, ended_s = running.result()
    assert num_tokens == NUM_TOKENS
    assert ended_s - began_s > 0.3  # it was still running when the hook started
    assert hook.returncode == 0, hook.stderr
    assert time.monotonic() - began_s < DRAIN_S + 30
    with pytest.raises(httpx.HTTPError):
        httpx.get(pod.url("http", "/-/healthz"))
