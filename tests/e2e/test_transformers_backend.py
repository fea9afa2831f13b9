"""A model that transformers' code runs, in the real service."""

import pytest

from specdec import LLM, SamplingParams
from specdec.client import Client
from tests.e2e.conftest import ALWAYS_DRAFT, running_service
from tests.specdec.llm.models import arguments
from tests.specdec.models.foreign import save_foreign
from tests.specdec.tiny import train_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5 + index, 6, 7, 8 + index] * 3 for index in range(4)]


def test_the_service_has_the_tokens_of_the_model_in_process(tmp_path):
    model = tmp_path / "gpt2"
    save_foreign(model, "gpt2")
    train_tokenizer(383).save_pretrained(model)
    with LLM(**arguments(model, speculative_config=None)) as llm:
        outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY)
    expected = [list(each.outputs[0].token_ids) for each in outputs]
    flags = ["--max-model-len", "128", *ALWAYS_DRAFT]
    with (
        running_service(model, tmp_path / "log", *flags) as service,
        Client(service.grpc_address, timeout_s=60) as client,
    ):
        found = [client.generate(each, GREEDY) for each in PROMPTS]
        assert [list(each.choices[0].token_ids) for each in found] == expected
        assert "transformers' code runs GPT2LMHeadModel" in service.log.read_text()
