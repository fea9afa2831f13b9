"""A model on Triton's kernels: tokens equal those of torch's, end to end."""

from dataclasses import replace

import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from tests.specdec.engine.test_head_trees import Recording, Texts, requests
from tests.specdec.engines import engine_config, local_engine, make_engine, request, run, tokens_by
from tests.specdec.models.families import save_family
from tests.specdec.models.passes import mixed_logits
from tests.specdec.worker.device.runners import device_target

PROMPTS = [[11, 12, 13, 11, 12], [7]]
SAMPLING = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}]
IDS = ([(5 * i) % 300 for i in range(34)], [(7 * i) % 300 for i in range(27)])


def tokens_of(directory, kernels, config):
    return transcripts_of(local_engine(directory, config, kernels=kernels))


def transcripts_of(engine):
    asked = [
        request(f"r{i}", prompt, seed=i, max_tokens=4, **SAMPLING[i])
        for i, prompt in enumerate(PROMPTS)
    ]
    return {name: each.token_ids for name, each in run(engine, asked).items()}


@pytest.mark.slow
def test_logits_of_prefill_decode_and_drafts_equal_torch(tiny_model_dir):
    group = TensorParallelGroup()
    logits = [
        mixed_logits(tiny_model_dir, IDS, group, kernels=name) for name in ("torch", "triton")
    ]
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "granite", "smollm3", "olmo3", "phi3", "gemma2", "starcoder2", "cohere"),
        *("gpt-oss", "deepseek-v3"),
    ],
)
def test_logits_of_families_equal_torch(tmp_path, family):
    """Together they have every trait: norms, partial rotation, windows, caps, sinks, latents."""
    save_family(tmp_path, family)
    group = TensorParallelGroup()
    logits = [
        mixed_logits(tmp_path, IDS, group, kernels=name, lengths=(15, 12))
        for name in ("torch", "triton")
    ]
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_tokens_equal_torch(tiny_model_dir, num_draft_tokens):
    config = engine_config(num_draft_tokens)
    expected = tokens_of(tiny_model_dir, "torch", config)
    assert tokens_of(tiny_model_dir, "triton", config) == expected


@pytest.mark.slow
def test_tokens_of_steps_on_the_device_equal_torch(tiny_model_dir):
    """Decodes and drafts run in fixed shapes, with attention, sampling and graphs as on a GPU."""
    config = engine_config(3, max_num_seqs=2)
    expected = tokens_of(tiny_model_dir, "torch", config)
    target = device_target(tiny_model_dir, config, kernels="triton")
    engine = make_engine(tiny_model_dir, config, target)
    assert transcripts_of(engine) == expected


@pytest.mark.slow
def test_tokens_with_trees_of_a_head_equal_torch(tiny_model_dir, tmp_path_factory):
    """The head's attention begins at slot 1, and accepted nodes move after their base."""
    texts = Texts(tiny_model_dir, tmp_path_factory.mktemp)
    asked = [replace(each, params=replace(each.params, max_tokens=6)) for each in requests()[2:]]
    expected = tokens_by(local_engine(tiny_model_dir, engine_config(0), kernels="torch"), asked)
    recording = Recording(texts, "eagle3", "triton").run(asked)
    assert recording.tokens == expected
    assert any(draft.parents is not None for draft in recording.drafts.values())


@pytest.mark.slow
def test_drafts_change_no_token_with_an_8_bit_cache(tiny_model_dir):
    """In steps on the device, with drafts or without: the same bits are stored and read."""
    found = []
    for num_draft_tokens in (0, 3):
        config = engine_config(num_draft_tokens, max_num_seqs=2, kv_cache_dtype="fp8")
        target = device_target(tiny_model_dir, config, kernels="triton")
        found.append(transcripts_of(make_engine(tiny_model_dir, config, target)))
    assert found[0] == found[1]
