"""deploy/serve/two-models.yaml, with tiny models, on a Ray that we did not start."""

from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1 import inference_pb2_grpc
from tests.e2e.serve_config import served

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(500)]

PROMPT = {"text": "The river", "sampling": {"temperature": 0, "max_tokens": 8}}


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("serve_config")
    config = yaml.safe_load(Path("deploy/serve/two-models.yaml").read_text())
    for application in config["applications"]:
        args = application["args"]
        args |= {"model": str(tiny_model_dir), "state_dir": str(directory / "state")}
        args.pop("max_replicas", None)
    with served(config, directory / "log") as running:
        yield running


@pytest.fixture(scope="module")
def stub(service):
    with grpc.insecure_channel(service.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


@pytest.mark.parametrize("name", ["chat", "extract"])
def test_each_answers_where_the_metadata_names_its_application(stub, name):
    metadata = [("application", name)]
    assert stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata).model == name
    answer = stub.Generate(pb.GenerateRequest(**PROMPT), metadata=metadata, timeout=60)
    assert answer.usage.completion_tokens == 8


def test_the_first_answers_where_nothing_is_named(service, stub):
    assert stub.GetModelInfo(pb.GetModelInfoRequest()).model == "chat"
    with grpc.insecure_channel(service.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("prefix", "model"), [("", "chat"), ("/extract", "extract")])
def test_each_answers_http_below_its_prefix(service, prefix, model):
    body = {"prompt": "The river", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{service.http_url}{prefix}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    assert httpx.get(f"{service.http_url}{prefix}/ready", timeout=10).status_code == 200
