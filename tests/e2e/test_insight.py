"""Tests of tracing and profiling on the real service."""

import gzip
import json
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub
from specdec.client import AdminClient, Client, ClientError, ProfileOrder
from specdec.types.sampling.sampling_params import SamplingParams
from tests.cluster.replica.test_trace_export import Collector
from tests.e2e.conftest import running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PARENT_ID = "b7ad6b7169203331"
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
DRAFT = '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold"}'


@pytest.fixture(scope="module")
def collector():
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector
    server.stop(0)


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory, collector):
    directory = tmp_path_factory.mktemp("insight")
    flags = ["--tensor-parallel-size", "2", "--speculative-config", DRAFT]
    flags += ["--otlp-traces-endpoint", f"http://127.0.0.1:{collector.port}"]
    flags += ["--profile-dir", str(directory / "profiles")]
    with running_service(tiny_model_dir, directory / "log", *flags) as service:
        yield service


def spans_of(collector, trace_id):
    """Return the five spans of one request, by name."""
    found = {}
    while len(found) < 5:
        try:
            request = collector.received.get(timeout=15)
        except queue.Empty:
            pytest.fail(f"only {sorted(found)} came of trace {trace_id}")
        for of_resource in request.resource_spans:
            for scope in of_resource.scope_spans:
                mine = (each for each in scope.spans if each.trace_id.hex() == trace_id)
                found |= {each.name: each for each in mine}
    return found


def attributes(span):
    return {each.key: each.value for each in span.attributes}


def test_a_grpc_request_is_traced(service, collector):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    sampling = pb.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with grpc.insecure_channel(service.grpc_address) as channel:
        InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(text="The river", sampling=sampling),
            metadata=[("traceparent", f"00-{trace_id}-{PARENT_ID}-01")],
            timeout=60,
        )
    spans = spans_of(collector, trace_id)
    root = spans.pop(root_name(spans))
    assert root.parent_span_id.hex() == PARENT_ID
    assert attributes(root)["gen_ai.usage.output_tokens"].int_value == 60
    assert {each.parent_span_id for each in spans.values()} == {root.span_id}
    decode = attributes(spans["decode"])
    assert decode["specdec.num_accepted_tokens"].int_value > 0
    assert decode["specdec.draft_s"].double_value > 0
    lasted_s = (spans["decode"].end_time_unix_nano - spans["decode"].start_time_unix_nano) / 1e9
    assert 0 < decode["specdec.verify_s"].double_value < lasted_s + 1


def root_name(spans):
    [name] = [name for name in spans if name.startswith("text_completion ")]
    return name


def test_an_http_request_is_traced(service, collector):
    trace_id = "1af7651916cd43dd8448eb211c80319d"
    response = httpx.post(
        f"{service.http_url}/dashboard/generate",
        json={"prompt": "The river", "as_chat": False, "max_tokens": 20, "temperature": 0},
        headers={"traceparent": f"00-{trace_id}-{PARENT_ID}-01"},
        timeout=60,
    )
    assert response.status_code == 200
    assert "decode" in spans_of(collector, trace_id)


class Streams:
    """Run two streams at all times, whose output must not change."""

    def __init__(self, service):
        self._service = service
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(2)

    def __enter__(self):
        self._runs = [self._pool.submit(self._run, index) for index in range(2)]

    def __exit__(self, *_):
        self._is_over.set()
        for each in self._runs:
            assert len(each.result()) == 1, "an answer changed while a profile was taken"
        self._pool.shutdown()

    def _run(self, index):
        answers = set()
        with Client(self._service.grpc_address, timeout_s=120) as client:
            while not self._is_over.is_set():
                answers.add(client.generate(f"The river {index}", PARAMS).token_ids)
        return answers


def test_both_models_are_profiled_while_requests_run(service):
    command = [sys.executable, "-m", "cluster", "profile", "--num-steps", "5", "--json"]
    with Streams(service):
        done = subprocess.run(
            [*command, "--address", service.grpc_address], capture_output=True, check=True
        )
    workers = json.loads(done.stdout)["workers"]
    assert [(each["worker"], each["rank"]) for each in workers] == [
        ("target", 0),
        ("target", 1),
        ("draft model", 0),
    ]
    for each in workers:
        assert each["fault"] == ""
        path = Path(each["trace_path"])
        assert path.stat().st_size == each["trace_bytes"] < 2**28
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "step" for event in events) >= each["num_steps"]
    assert [each["num_steps"] for each in workers[:2]] == [5, 5]
    assert workers[2]["num_steps"] >= 1
    calls = {each["name"]: each["num_calls"] for each in workers[0]["operations"]}
    assert calls["step"] == calls["forward"] == 5


def test_an_idle_profile_ends_at_its_timeout_and_excludes_others(service):
    with AdminClient(service.grpc_address) as admin, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(admin.profile, ProfileOrder(5, timeout_s=2.0))
        url = f"{service.http_url}/v1/admin/profile"
        while not taken.done():
            response = httpx.post(url, json={"num_steps": 1, "timeout_s": 0.2}, timeout=60)
            if response.status_code == 429:
                break
        assert response.status_code == 429
        assert response.json()["error"]["message"].startswith("a profile is being taken")
        report = taken.result()
    assert [each.num_steps for each in report.workers] == [0, 0, 0]
    assert {each.fault for each in report.workers} == {""}
    with Client(service.grpc_address) as client:
        assert len(client.generate("The river", PARAMS).token_ids) == 60


def test_profiling_needs_a_directory(embedded):
    with (
        AdminClient(embedded.grpc_address) as admin,
        pytest.raises(ClientError, match="profile_dir is None; it must be a directory") as error,
    ):
        admin.profile()
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
