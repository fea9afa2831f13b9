"""LoRA adapters of the real service, on two ranks: selected by name, loaded and unloaded live."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from specdec import LLM, SamplingParams
from tests.e2e.conftest import ALWAYS_DRAFT, running_service
from tests.specdec.adapters import HEAD_MODULES, adapter_dir, merged_dir
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.llm.models import arguments

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TOKENS = 24
PROMPTS = [[5 + index, 6, 7, 8 + index] * 3 for index in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    """Directories of two adapters by their names."""
    root = tmp_path_factory.mktemp("adapters")
    names = ("first", "second")
    return {
        name: adapter_dir(root / name, tiny_model_dir, seed=seed) for seed, name in enumerate(names)
    }


@pytest.fixture(scope="module")
def expected(tiny_model_dir, adapters, tmp_path_factory):
    """Texts of the model with each adapter merged into its weights, and without one."""
    root = tmp_path_factory.mktemp("merged")
    models = {"tiny": tiny_model_dir}
    models |= {
        name: merged_dir(root / name, tiny_model_dir, path) for name, path in adapters.items()
    }
    texts = {}
    for name, directory in models.items():
        with LLM(**arguments(directory, speculative_config=None)) as llm:
            outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY)
        texts[name] = [each.outputs[0].text for each in outputs]
    return texts


@pytest.fixture(scope="module")
def service(tiny_model_dir, adapters, tmp_path_factory):
    log = tmp_path_factory.mktemp("lora") / "log"
    flags = ["--tensor-parallel-size", "2", "--max-model-len", "256", "--enable-lora"]
    flags += ["--served-model-name", "tiny", "--max-loras", "2", *ALWAYS_DRAFT]
    flags += ["--lora-modules", f"first={adapters['first']}"]
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


def completions(service, model):
    """Return the texts of all prompts, which the service runs together."""

    def complete(prompt):
        body = {"model": model, "prompt": prompt, "temperature": 0.0, "ignore_eos": True}
        body["max_tokens"] = NUM_TOKENS
        answer = httpx.post(f"{service.http_url}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(complete, PROMPTS))


def names(service):
    return [each["id"] for each in httpx.get(f"{service.http_url}/v1/models").json()["data"]]


def order(service, path, **body):
    return httpx.post(f"{service.http_url}/v1/{path}_lora_adapter", json=body, timeout=60)


def test_adapters_have_the_texts_of_merged_models_while_they_come_and_go(
    service, adapters, expected
):
    assert len(set(map(tuple, expected.values()))) == 3
    assert names(service) == ["tiny", "first"]
    with ThreadPoolExecutor(1) as traffic:
        running = traffic.submit(
            lambda: [completions(service, name) for name in ("tiny", "first") * 4]
        )
        loaded = order(service, "load", lora_name="second", lora_path=str(adapters["second"]))
        assert loaded.status_code == 200, loaded.text
        assert completions(service, "second") == expected["second"]
        assert order(service, "unload", lora_name="second").status_code == 200
        assert running.result() == [expected["tiny"], expected["first"]] * 4
    assert names(service) == ["tiny", "first"]
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        completions(service, "second")


def test_an_adapter_of_a_draft_head(tiny_model_dir, adapters, expected, tmp_path):
    """On two ranks, with the adapter of the target and alone."""
    head = fitted_medusa_dir(tiny_model_dir, tmp_path / "head", PROMPTS)
    draft = str(adapter_dir(tmp_path / "draft", head, modules=HEAD_MODULES))
    speculation = {"method": "medusa", "model": str(head), "policy": "threshold"}
    flags = ["--tensor-parallel-size", "2", "--max-model-len", "256", "--enable-lora"]
    flags += ["--served-model-name", "tiny", "--max-loras", "2"]
    flags += ["--speculative-config", json.dumps(speculation)]
    with running_service(tiny_model_dir, tmp_path / "log", *flags) as service:
        first = str(adapters["first"])
        for body in ({"lora_name": "both", "lora_path": first}, {"lora_name": "alone"}):
            loaded = order(service, "load", **body, draft_lora_path=draft)
            assert loaded.status_code == 200, loaded.text
        assert completions(service, "both") == expected["first"]
        assert completions(service, "alone") == expected["tiny"]
        refused = order(service, "load", lora_name="wrong", draft_lora_path=first)
        assert "is not a linear layer of the draft head's layers" in refused.text
        replicas = httpx.get(f"{service.http_url}/v1/admin/adapters").json()["replicas"]
        for info, source in zip(replicas[0]["adapters"], (first, ""), strict=True):
            assert (info["source"], info["draft_source"]) == (source, draft)
            assert info["speculation"]["num_drafts"] > 0
