"""Tests deploy/serve/two-models.yaml with tiny models, on a Ray that `serve run` starts."""

import time
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.specdec.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from protos.specdec.v1 import inference_pb2 as pb
from tests.e2e.serve_config import served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OPENAI = {
    "/v1/completions": {"model": "extract", "prompt": "The river", "max_tokens": 8},
    "/v1/chat/completions": {
        "model": "extract",
        "messages": [{"role": "user", "content": "The river"}],
        "max_tokens": 8,
    },
    "/v1/responses": {"model": "extract", "input": "The river", "max_output_tokens": 8},
    "/tokenize": {"model": "extract", "prompt": "The river"},
}
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
def test_metadata_selects_the_application(stub, name):
    metadata = [("application", name)]
    assert stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata).model == name
    answer = stub.Generate(pb.GenerateRequest(**PROMPT), metadata=metadata, timeout=60)
    assert answer.usage.completion_tokens == 8


def test_the_first_application_serves_requests_without_metadata(service, stub):
    assert stub.GetModelInfo(pb.GetModelInfoRequest()).model == "chat"
    with grpc.insecure_channel(service.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("prefix", "model"), [("", "chat"), ("/extract", "extract")])
def test_each_application_serves_http_below_its_prefix(service, prefix, model):
    body = {"prompt": "The river", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{service.http_url}{prefix}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    assert httpx.get(f"{service.http_url}{prefix}/ready", timeout=10).status_code == 200


class TestByModel:
    """Requests to the first application for the model of the other one."""

    def test_unary_and_streamed_calls(self, stub):
        here = stub.Generate(
            pb.GenerateRequest(**PROMPT), metadata=[("application", "extract")], timeout=60
        )
        request = pb.GenerateRequest(model="extract", **PROMPT)
        answer = stub.Generate(request, timeout=60)
        assert answer.choices[0].token_ids == here.choices[0].token_ids
        chunks = list(stub.GenerateStream(request, timeout=60))
        streamed = [token for chunk in chunks for token in chunk.token_ids]
        assert streamed == list(here.choices[0].token_ids)
        assert chunks[-1].usage.completion_tokens == 8

    def test_tokens_and_info(self, stub):
        tokens = stub.Tokenize(pb.TokenizeRequest(model="extract", text="The river"), timeout=30)
        text = stub.Detokenize(
            pb.DetokenizeRequest(model="extract", token_ids=tokens.token_ids), timeout=30
        )
        assert text.text == "The river"
        info = stub.GetModelInfo(pb.GetModelInfoRequest(model="extract"), timeout=30)
        assert (info.model, info.speculation_method) == ("extract", pb.SPECULATION_METHOD_SUFFIX)

    def test_errors_are_those_of_the_serving_application(self, stub):
        request = pb.GenerateRequest(model="extract", text="x", sampling={"top_p": 7})
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(request, timeout=30)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "top_p" in caught.value.details()

    @pytest.mark.parametrize("call", ["Generate", "GenerateStream"])
    def test_an_unknown_model_is_not_found(self, stub, call):
        with pytest.raises(grpc.RpcError) as caught:
            list(as_stream(getattr(stub, call)(pb.GenerateRequest(model="x", **PROMPT))))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'chat', 'extract'" in caught.value.details()

    def test_the_openai_api(self, service):
        for path, body in OPENAI.items():
            answer = httpx.post(service.http_url + path, json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json().get("model", "extract") == "extract"
            with httpx.stream(
                "POST", service.http_url + path, json={**body, "stream": True}, timeout=60
            ) as streamed:
                if path != "/tokenize":
                    assert streamed.headers["content-type"].startswith("text/event-stream")
                assert "".join(streamed.iter_text())

    def test_the_models_are_listed(self, service):
        models = httpx.get(service.http_url + "/v1/models", timeout=30).json()["data"]
        assert [each["id"] for each in models] == ["chat", "extract"]
        one = httpx.get(service.http_url + "/v1/models/extract", timeout=30)
        assert one.json()["id"] == "extract"
        none = httpx.get(service.http_url + "/v1/models/x", timeout=30)
        assert none.status_code == 404
        assert "'chat', 'extract'" in none.json()["error"]["message"]

    def test_operators(self, service):
        with grpc.insecure_channel(service.grpc_address) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            change = admin_pb2.SetSpeculationRequest(
                model="extract", mode=admin_pb2.SPECULATION_MODE_OFF
            )
            admin.SetSpeculation(change, timeout=30)
            modes = [
                admin.GetSpeculation(
                    admin_pb2.GetSpeculationRequest(model=model), timeout=30
                ).state.in_force.mode
                for model in ("chat", "extract")
            ]
        assert modes == [admin_pb2.SPECULATION_MODE_AUTO, admin_pb2.SPECULATION_MODE_OFF]
        url = service.http_url + "/v1/admin/speculation"
        answer = httpx.put(url + "?model=extract", json={"reset": True}, timeout=30)
        assert answer.status_code == 200, answer.text
        assert httpx.get(url + "?model=x", timeout=30).status_code == 404

    def test_metrics_include_both_models(self, service):
        text = httpx.get(service.http_url + "/metrics", timeout=30).text
        for model in ("chat", "extract"):
            assert f'specdec:num_requests_running{{model_name="{model}"' in text

    def test_a_cancelled_request_is_aborted(self, service, stub):
        long = {"text": "The river", "sampling": {"max_tokens": 450, "ignore_eos": True}}
        stream = stub.GenerateStream(pb.GenerateRequest(model="extract", **long), timeout=60)
        next(stream)
        assert running(service, "extract") == 1
        stream.cancel()
        deadline = time.monotonic() + 10
        while running(service, "extract"):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def as_stream(answer):
    return answer if hasattr(answer, "__iter__") else [answer]


def running(service, model):
    status = httpx.get(f"{service.http_url}/v1/admin/status?model={model}", timeout=30).json()
    return sum(each["report"]["num_running"] for each in status["replicas"])
