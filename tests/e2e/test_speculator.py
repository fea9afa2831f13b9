"""`specdec serve --model DIR` where the directory holds a draft head that names its target."""

import json
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.client import Client
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions
from tests.e2e.conftest import running_service
from tests.specdec.heads import HEADS
from tests.specdec.speculators import speculator_dir

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [(29 * place) % 380 + 3 for place in range(30)]
NUM_TOKENS = 24


def greedy_answer(directory):
    """Return the answer of transformers to the prompt."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(PROMPT) :].tolist()


def ask(client, temperature=0.0, **options):
    params = SamplingParams(
        temperature=temperature,
        seed=5,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        speculation=SpeculationOptions(**options),
    )
    return client.generate(PROMPT, params)


def test_a_speculator_serves_the_target_that_it_names(tiny_model_dir, tmp_path):
    """The head is fitted to the answer, so that some of its drafts are accepted."""
    expected = greedy_answer(tiny_model_dir)
    target = shutil.copytree(tiny_model_dir, tmp_path / "target")
    fitted = HEADS["eagle3"](tiny_model_dir, tmp_path / "fitted", [PROMPT + expected])
    head = speculator_dir(fitted, tmp_path / "head", "../target", num_draft_tokens=2)
    log = tmp_path / "log"
    # Drafts at every load, since goodput would turn them off for a tiny model.
    flags = ["--max-model-len", "256", "--speculative-config", json.dumps({"policy": "threshold"})]
    with running_service(head, log, *flags) as service:
        assert f"{head} is a head for method eagle3; its target is {target}" in log.read_text()
        with Client(service.grpc_address, timeout_s=60) as client:
            info = client.model_info()
            drafted, plain = ask(client), ask(client, enabled=False)
            sampled = [ask(client, 0.8, enabled=each).token_ids for each in (True, False)]
    assert (info.model, info.architecture) == ("head", "LlamaForCausalLM")
    assert info.speculation_method == "eagle3"
    assert list(drafted.token_ids) == list(plain.token_ids) == expected
    assert sampled[0] == sampled[1]
    counts = drafted.usage.speculation
    assert counts.num_accepted_tokens > 0
    assert counts.num_drafts < counts.num_draft_tokens <= 2 * counts.num_drafts, (
        "as the files specify"
    )
    assert plain.usage.speculation.num_drafts == 0
