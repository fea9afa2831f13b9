"""`specdec serve` with a list of models, each answered for by whichever Router is asked."""

import httpx
import pytest
import yaml

from specdec.client import Client, ClientError
from specdec.sampling_params import SamplingParams
from tests.e2e.conftest import running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("several")
    models = [
        {"served_model_name": "first", "speculative_config": None},
        {"served_model_name": "Second.Model", "quantization": "int8"},
    ]
    config = {
        "ingress": "serve",
        "max_model_len": 512,
        "models": [{"model": str(tiny_model_dir), **each} for each in models],
    }
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    with running_service(None, directory / "log", "--config", str(file)) as running:
        yield running


def test_each_model_is_served_by_its_name(service):
    with Client(service.grpc_address) as client:
        assert client.model_info().model == "first"
        for name in ("first", "Second.Model"):
            assert client.model_info(name).model == name
            answer = client.generate("The river", SHORT, model=name)
            assert answer.usage.completion_tokens == 8
        with pytest.raises(ClientError, match=r"'first', 'Second\.Model'"):
            client.model_info("third")


def test_the_second_has_a_path_of_its_own(service):
    url = service.http_url
    assert httpx.get(url + "/second-model/ready", timeout=10).status_code == 200
    [own, other] = httpx.get(url + "/second-model/v1/models", timeout=10).json()["data"]
    assert (own["id"], other["id"]) == ("Second.Model", "first")
    assert httpx.get(url + "/second-model/dashboard/", timeout=10).status_code == 200
