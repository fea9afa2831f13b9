"""Tests of `specdec serve` with several models; every Router forwards to the others."""

import subprocess
import sys

import httpx
import pytest
import yaml
from grpc import StatusCode

from specdec.client import AdminClient, Client, ClientError
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY, *ONCE = "sk-correct-horse", "sk-once-by-http", "sk-once-by-grpc"
BEARER = {"authorization": f"Bearer {KEY}"}
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("several")
    models = [
        {"served_model_name": "first", "speculative_config": None},
        {"served_model_name": "Second.Model", "quantization": "int8"},
    ]
    keys = [{"name": "ann", "key": KEY}]
    keys += [{"name": key, "key": key, "requests_per_s": 0.001} for key in ONCE]
    (directory / "keys.yaml").write_text(yaml.safe_dump(keys))
    config = {
        "ingress": "serve",
        "api_key_file": str(directory / "keys.yaml"),
        "max_model_len": 512,
        "models": [{"model": str(tiny_model_dir), **each} for each in models],
    }
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    with running_service(None, directory / "log", "--config", str(file)) as running:
        yield running


def test_each_model_is_served_by_its_name(service):
    with Client(service.grpc_address, api_key=KEY) as client:
        assert client.model_info().model == "first"
        for name in ("first", "Second.Model"):
            assert client.model_info(name).model == name
            answer = client.generate("The river", SHORT, model=name)
            assert answer.usage.completion_tokens == 8
        with pytest.raises(ClientError, match=r"'first', 'Second\.Model'"):
            client.model_info("third")


def test_the_proxies_listen_only_on_loopback(service):
    assert service.listening() == {("127.0.0.1", port) for port in service.ports}


def test_an_unknown_model_leaves_no_traceback(service):
    refused = pytest.raises(ClientError, match="model 'third' is not served")
    with Client(service.grpc_address, api_key=KEY) as client, refused as raised:
        list(client.generate_stream("The river", SHORT, model="third"))
    assert raised.value.code is StatusCode.NOT_FOUND
    assert "Traceback" not in service.log.read_text()


def test_the_second_model_has_its_own_path(service):
    url = service.http_url
    assert httpx.get(url + "/second-model/ready", timeout=10).status_code == 200
    models = httpx.get(url + "/second-model/v1/models", headers=BEARER, timeout=10)
    [own, other] = models.json()["data"]
    assert (own["id"], other["id"]) == ("Second.Model", "first")
    assert httpx.get(url + "/second-model/dashboard/", timeout=10).status_code == 200


def complete(service, model, headers):
    body = {"model": model, "prompt": "The river", "max_tokens": 2}
    return httpx.post(f"{service.http_url}/v1/completions", json=body, headers=headers, timeout=30)


@pytest.mark.parametrize("model", ["first", "Second.Model", "third"])
def test_forwarded_requests_need_a_key_too(service, model):
    with Client(service.grpc_address) as client:
        for call in (client.generate, lambda *_, model: client.model_info(model)):
            with pytest.raises(ClientError) as caught:
                call("The river", model=model)
            assert caught.value.code is StatusCode.UNAUTHENTICATED
            assert "first" not in caught.value.message
    assert complete(service, model, {}).status_code == 401
    assert complete(service, model, BEARER).status_code == (404 if model == "third" else 200)


def test_a_forwarded_request_counts_once_at_the_serving_model(service):
    """A key with a limit of one request may send one to each model."""
    by_http, by_grpc = ONCE
    statuses = [
        complete(service, model, {"authorization": f"Bearer {by_http}"}).status_code
        for model in ("Second.Model", "first", "Second.Model", "first")
    ]
    assert statuses == [200, 200, 429, 429]
    with Client(service.grpc_address, api_key=by_grpc) as client:
        for model in ("Second.Model", "first"):
            assert client.generate("The river", SHORT, model=model).usage.completion_tokens == 8
        for model in ("Second.Model", "first"):
            with pytest.raises(ClientError, match="this API key is limited to"):
                client.generate("The river", SHORT, model=model)


def test_admin_commands_select_the_model(service, monkeypatch):
    monkeypatch.setenv("SPECDEC_API_KEY", KEY)  # without an admin token, a key is the credential

    def ask(*arguments):
        command = [sys.executable, "-m", "cluster", *arguments, "--address", service.grpc_address]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    second = ["--model", "Second.Model"]
    assert ask("speculation", "set", "--mode", "off", *second).returncode == 0
    assert "off" in ask("speculation", "get", *second).stdout
    with AdminClient(service.grpc_address, token=KEY, model="Second.Model") as admin:
        assert admin.get_speculation().in_force.mode == "off"
        assert next(admin.watch()).status.replicas[0].report.mode == "off"
        assert len(admin.replicas()) == 1
        entries = admin.audit_log().entries
        assert [each.version for each in entries] == [1]
    with AdminClient(service.grpc_address, token=KEY) as admin:
        assert admin.audit_log().entries == ()
    unknown = ask("status", "--model", "third")
    assert unknown.returncode == 1
    assert "'first', 'Second.Model'" in unknown.stderr
