# Modules: specdec.config.kv_cache, specdec.models.dtypes
"""Lossless tests with a KV cache of 8-bit floats: drafts change no token, and the type some."""

import pytest
import torch

from specdec.config.llm import LLMConfig
from specdec.kernels.cpu import native_library
from specdec.kernels.reference.kv_scales import KVScales
from specdec.types.errors import InvalidValueError
from specdec.worker import LocalTarget
from tests.specdec.engine.test_head_trees import Recording, Texts, requests
from tests.specdec.engine.test_lossless import prompts
from tests.specdec.engines import (
    draft_model,
    engine_config,
    local_engine,
    make_engine,
    request,
    tokens_by,
)
from tests.specdec.worker.device.runners import device_runner

FP8 = ("fp8_e4m3", "fp8_e5m2")
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


def asked(**params):
    pairs = enumerate(prompts(6).items())
    return [request(name, prompt, seed=index, **params) for index, (name, prompt) in pairs]


def engine(directory, num_draft_tokens, kv_cache_dtype="fp8", **changes):
    config = engine_config(num_draft_tokens, kv_cache_dtype=kv_cache_dtype, **changes)
    return local_engine(directory, config, kernels="torch")


@pytest.mark.parametrize("kv_cache_dtype", FP8)
def test_lookups_batches_and_preemption_change_no_token(tiny_model_dir, kv_cache_dtype):
    own = asked(**SAMPLED)
    plain = tokens_by(engine(tiny_model_dir, 0, kv_cache_dtype), own)
    drafting = engine(tiny_model_dir, 3, kv_cache_dtype, num_blocks=40)
    assert tokens_by(drafting, own) == plain
    assert tokens_by(drafting, own[::-1]) == plain
    counts = drafting.stats().counts
    assert counts.speculation.num_accepted_tokens > 0
    assert counts.num_preemptions > 0
    assert counts.num_cached_tokens > 0


def test_the_type_changes_the_output(tiny_model_dir):
    own = asked(**SAMPLED, max_tokens=60)
    kinds = ("auto", *FP8)
    found = [tokens_by(engine(tiny_model_dir, 0, kind), own) for kind in kinds]
    assert found[0] != found[1] != found[2] != found[0]


def test_a_draft_model_has_the_same_type_and_changes_no_token(tiny_model_dir):
    own = asked()
    plain = tokens_by(engine(tiny_model_dir, 0), own)
    proposer = draft_model(tiny_model_dir, kernels="torch", kv_cache_dtype="fp8")
    assert proposer._worker._runner.kv_cache.dtype == torch.float8_e4m3fn
    config = engine_config(3, kv_cache_dtype="fp8")
    drafting = local_engine(tiny_model_dir, config, proposer=proposer, kernels="torch")
    assert tokens_by(drafting, own) == plain
    assert drafting.stats().counts.speculation.num_accepted_tokens > 20


def test_steps_on_the_device_change_no_token(tiny_model_dir):
    own = asked(**SAMPLED)
    config = engine_config(3, kv_cache_dtype="fp8")
    runner = device_runner(tiny_model_dir, config)
    assert runner.kv_cache.dtype == torch.float8_e4m3fn
    found = tokens_by(make_engine(tiny_model_dir, config, LocalTarget(runner)), own)
    assert found == tokens_by(engine(tiny_model_dir, 0), own)


@pytest.mark.slow
def test_trees_of_a_head_change_no_token(tiny_model_dir, tmp_path_factory):
    """Accepted nodes move after their base, in a cache of bytes."""
    texts, own = Texts(tiny_model_dir, tmp_path_factory.mktemp), requests()
    expected = tokens_by(engine(tiny_model_dir, 0), own)
    recording = Recording(texts, "eagle3", "torch", kv_cache_dtype="fp8").run(own)
    assert recording.tokens == expected
    assert any(draft.parents is not None for draft in recording.drafts.values())
    assert recording.counts.speculation.num_accepted_tokens > 0


def test_scales_of_the_layers_are_used(tiny_model_dir):
    """Scales that fit keep the values; those that overflow do not."""
    own = asked(max_tokens=8)
    config = engine_config(0, kv_cache_dtype="fp8")

    def generated(scales):
        runner = device_runner(tiny_model_dir, config, runs_on_device=False)
        for layer in runner.model.layers:
            layer.attention.kv_scales = scales
        return tokens_by(make_engine(tiny_model_dir, config, LocalTarget(runner)), own)

    plain = generated(KVScales())
    assert generated(KVScales(0.5, 0.25)) == plain  # exponents, so the values are the same
    assert generated(KVScales(1e-6, 1e-6)) != plain


@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_the_native_kernels_of_cpus_are_refused(kernels):
    with pytest.raises(
        InvalidValueError, match="kv_cache_dtype is 'fp8'; it must be auto on a CPU"
    ):
        LLMConfig(kv_cache_dtype="fp8", kernels=kernels)
    assert LLMConfig(kv_cache_dtype="fp8", kernels="torch").kv_cache_dtype == "fp8"
    assert LLMConfig(kv_cache_dtype="fp8", device="cuda").kv_cache_dtype == "fp8"


@pytest.mark.skipif(native_library() is None, reason="no native kernels")
def test_a_rank_on_native_kernels_refuses_it(tiny_model_dir):
    config = engine_config(0, kv_cache_dtype="fp8")
    with pytest.raises(InvalidValueError, match="auto with the native kernels"):
        local_engine(tiny_model_dir, config, kernels="auto")
