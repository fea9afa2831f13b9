"""Which draft models run in the target's processes."""

import shutil
from dataclasses import replace

import pytest

from specdec.config.engine import AdapterLimits
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.models.colocation import with_colocated_draft
from tests.specdec.tiny import tiny_llama_dir


@pytest.fixture(scope="module")
def draft_dir(tiny_model_dir, tmp_path_factory):
    return shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("draft") / "model")


def decided(target, draft, **keys):
    """Return the methods, and the lines with the reasons."""
    lines = []
    speculation = SpeculativeConfig.of("draft_model", 4, model=draft and str(draft), **keys)
    config = LLMConfig(model=str(target), device="cuda", speculative_config=speculation)
    found = with_colocated_draft(config, lines.append).speculative_config
    return found, lines


def test_a_draft_model_with_the_targets_tokens_moves_to_its_process(tiny_model_dir, draft_dir):
    keys = {"quantization": "int8", "draft_window": 64, "fallback": "ngram", "share_gpu": True}
    found, lines = decided(tiny_model_dir, draft_dir, **keys)
    assert found.methods == ("colocated_draft_model", "ngram")
    assert (found.head.model, found.head.quantization) == (str(draft_dir), "int8")
    assert (found.head.window, found.num_speculative_tokens) == (64, 4)
    assert found.draft_model is None
    [line] = lines
    assert line.endswith("on the same GPU: method colocated_draft_model"), "its name in requests"


def test_the_target_may_draft_for_itself(tiny_model_dir):
    found, _ = decided(tiny_model_dir, None, quantization="int8")
    assert found.head.model == str(tiny_model_dir)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"draft_confidence_threshold": 0.4}, "draft_confidence_threshold is 0.4"),
        ({"parallel_drafting": True}, "parallel_drafting is True"),
        ({"async_drafting": "outcomes"}, "async_drafting is outcomes"),
        ({"max_model_len": 100}, "max_model_len is 100"),
    ],
)
def test_what_only_a_worker_does_keeps_the_worker(tiny_model_dir, draft_dir, keys, reason):
    found, lines = decided(tiny_model_dir, draft_dir, **keys)
    assert found.methods == ("draft_model",)
    assert lines == [f"a worker runs the draft model, on the target's GPU: {reason}"]


def test_another_vocabulary_needs_the_worker(tiny_model_dir, tmp_path):
    other = tiny_llama_dir(tmp_path / "other", vocab=350)
    found, [line] = decided(tiny_model_dir, other)
    assert found.methods == ("draft_model",)
    assert line.endswith("its vocabulary is not the target's")


def test_a_head_or_adapters_keep_the_worker(tiny_model_dir, draft_dir):
    fallback = {"method": "draft_model", "model": str(draft_dir)}
    speculation = SpeculativeConfig.of("medusa", model="heads", fallback=fallback)
    config = LLMConfig(model=str(tiny_model_dir), device="cuda", speculative_config=speculation)
    lines = []
    assert with_colocated_draft(config, lines.append) is config
    assert lines[0].endswith("the target's ranks draft by medusa")
    plain = SpeculativeConfig.of("draft_model", model=str(draft_dir))
    config = replace(config, speculative_config=plain, enable_lora=True)
    assert isinstance(config.adapter_limits, AdapterLimits)
    assert with_colocated_draft(config, lines.append) is config
    assert lines[1].endswith("it may have separate adapters")


def test_without_a_draft_model_nothing_changes(tiny_model_dir):
    config = LLMConfig(model=str(tiny_model_dir), device="cuda")
    assert with_colocated_draft(config, print) is config
