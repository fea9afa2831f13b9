# Modules: specdec.models.layers.latent_attention, specdec.models.layers.latent_expansion
# Modules: specdec.models.layers.qk_norm, specdec.models.config.decoder_tensors
# Modules: specdec.models.gemma4, specdec.models.layers.gemma4_layer
# Modules: specdec.models.config.attention.varied_layers
"""Reference tests: each architecture and feature against transformers, on one and several ranks."""

import json
from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import decoder_tensors
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.registry import SUPPORTED_ARCHITECTURES
from specdec.models.gemma4 import Gemma4Decoder
from specdec.models.llama import CausalDecoder
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.models.weights.checks import check_tensors
from tests.specdec.engines import engine_config, local_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import (
    FAMILIES,
    LLAMA_LIKE,
    NEWER_THAN_KEYS,
    WINDOW,
    WITH_ALL_TRAITS,
    in_make_test,
    reference_model,
    save_family,
)
from tests.specdec.models.hybrid_families import HYBRIDS
from tests.specdec.models.passes import (
    BLOCK_SIZE,
    batch_of,
    in_pass_order,
    load,
    mixed_logits,
)
from tests.specdec.models.recent_families import RECENT
from tests.specdec.tiny import train_tokenizer

TOLERANCE = 1e-4


@cache
def reference(directory):
    return reference_model(directory)


def reference_logits(directory, ids):
    model = reference(directory)
    with torch.inference_mode():
        return [model(torch.tensor([each])).logits[0] for each in ids]


@pytest.fixture(scope="module")
def ids():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 383, (40,), generator=generator).tolist() for _ in range(2)]


EACH = pytest.mark.parametrize("family", FAMILIES, indirect=True)
SOME = pytest.mark.parametrize(
    "family", in_make_test([*LLAMA_LIKE, *WITH_ALL_TRAITS]), indirect=True
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, ids):
    """A function that writes each family once, for all tests."""

    @cache
    def save(name):
        directory = tmp_path_factory.mktemp(name)
        save_family(directory, name)
        return directory, reference_logits(directory, ids)

    return save


@pytest.fixture
def family(request, saved):
    """A model directory, and the logits of transformers."""
    return saved(request.param)


def test_every_architecture_is_tested():
    tested = {f"{family}ForCausalLM" for family, _ in (FAMILIES | HYBRIDS).values()}
    assert tested == set(SUPPORTED_ARCHITECTURES)


def passes():
    """Yield (family, ranks, kernels); make test has all of two families, one or two of others."""
    for index, name in enumerate(FAMILIES):
        for size in (1, 2, 3):
            for kernels in ("auto", "torch"):
                is_one = size == (1 if kernels == "torch" else 1 + index % 3)
                is_quick = name in LLAMA_LIKE[:2] or (
                    is_one and (kernels == "auto" or name not in RECENT)
                )
                marks = () if is_quick else pytest.mark.slow
                yield pytest.param(name, size, kernels, marks=marks)


@pytest.mark.parametrize(("family", "size", "kernels"), list(passes()), indirect=["family"])
def test_logits_equal_transformers(family, ids, size, kernels):
    directory, expected = family
    parts = run_ranks(size, lambda group: mixed_logits(directory, ids, group, kernels=kernels))
    torch.testing.assert_close(
        torch.cat(parts, dim=1), in_pass_order(expected), atol=TOLERANCE, rtol=TOLERANCE
    )


@EACH
def test_every_parameter_is_read_and_counted(family):
    directory, _ = family
    config = ModelConfig.from_directory(directory)
    reader = open_checkpoint(directory, torch.float32)
    decoder = CausalDecoder if config.varied is None else Gemma4Decoder
    decoder(config, reader, TensorParallelGroup(), 128, BLOCK_SIZE)
    model = reference(directory)
    stored = ("correction_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")
    buffers = (each for name, each in model.named_buffers() if name.endswith(stored))
    expected = model.num_parameters() + sum(each.numel() for each in buffers)
    assert config.num_parameters == reader.num_elements_read == expected
    tensors = decoder_tensors(config, reader.tensors)
    found = check_tensors(reader.tensors, reader.weight_format, tensors)
    assert (found.faults, found.unused, found.known_unused) == ((), "", "")
    assert sum(map(prod, tensors.values())) == expected


@SOME
def test_engine_output_equals_transformers(family):
    """Greedy, with drafts, chunked prefill, several sequences in a batch, and preemption."""
    directory, _ = family
    train_tokenizer(383).save_pretrained(directory)
    prompts = {"a": [5, 6, 7, 8] * 12, "b": [21, 22, 23] * 3, "c": [301, 77] * 20}
    config = engine_config(3, max_model_len=96, num_blocks=32, max_num_batched_tokens=32)
    engine = local_engine(directory, config)
    transcripts = run(engine, [request(name, prompt) for name, prompt in prompts.items()])
    assert engine.stats().counts.speculation.num_draft_tokens > 0
    assert engine.stats().counts.num_preemptions > 0
    for name, prompt in prompts.items():
        (logits,) = reference_logits(directory, [prompt + transcripts[name].token_ids])
        steps = logits[len(prompt) - 1 : -1]
        chosen = steps.gather(1, torch.tensor(transcripts[name].token_ids)[:, None])[:, 0]
        # Closer logits are ties, which a pass of another shape may round either way.
        assert (steps.amax(1) - chosen).max() < 1e-3


@pytest.mark.parametrize("family", in_make_test(LLAMA_LIKE), indirect=True)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_16_bit_logits_are_close_to_float32(family, ids, dtype, kernels):
    directory, expected = family
    logits = mixed_logits(directory, ids, TensorParallelGroup(), dtype, kernels=kernels)
    assert logits.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(logits.float(), in_pass_order(expected))
    # Rounding may route a token to another expert.
    is_sparse = ModelConfig.from_directory(directory).experts is not None
    found = similarity.median() if is_sparse else similarity.min()
    assert found > (0.99 if dtype == torch.bfloat16 else 0.999)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "granite"])
def test_embeddings_are_scaled_as_in_transformers(tmp_path, ids, name, dtype, kernels):
    """Gemma rounds the factor to the data type, 9.487 to 9.5 in bfloat16; Granite does not."""
    save_family(tmp_path, name, **{"embedding_multiplier": 9.487} if name == "granite" else {})
    entering = []
    expected = reference_model(tmp_path, dtype)
    layer = expected.model.layers[0]
    layer.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0][0]))
    with torch.inference_mode():
        expected(torch.tensor(ids[:1]))
    model = load(tmp_path, TensorParallelGroup(), dtype, kernels=kernels)
    batch = batch_of([(ids[0], 0, list(range(10)))])
    with torch.inference_mode():
        found = model.forward_with_taps(batch, model.new_kv_cache(10 * BLOCK_SIZE), (0,)).tapped
    torch.testing.assert_close(found[:, 0].to(dtype), entering[0], atol=0, rtol=1e-6)


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["olmo2", "cohere"])
def test_native_taps_are_those_of_torch(tmp_path, ids, name):
    """OLMo 2 has no norm before attention; a layer of Command R reads one norm twice."""
    save_family(tmp_path, name)
    batch = batch_of([(ids[0], 0, list(range(10)))])

    def tapped(kernels):
        model = load(tmp_path, TensorParallelGroup(), kernels=kernels)
        cache = model.new_kv_cache(10 * BLOCK_SIZE)
        with torch.inference_mode():
            return model.forward_with_taps(batch, cache, (1, 0, num_layers)).tapped.float()

    num_layers = ModelConfig.from_directory(tmp_path).num_layers
    found = tapped("native")
    torch.testing.assert_close(found, tapped("torch"), atol=1e-4, rtol=1e-4)
    assert not torch.equal(found[:, 0], found[:, 1])


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in NEWER_THAN_KEYS], indirect=True
)
def test_the_older_keys_of_a_config_are_equivalent(family):
    directory, _ = family
    config = ModelConfig.from_directory(directory)
    raw = json.loads((directory / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    if "full_attention" in scaling:
        raw["rope_local_base_freq"] = scaling["sliding_attention"]["rope_theta"]
        scaling = scaling["full_attention"]
    raw["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        raw["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    scaling["type"] = scaling.pop("rope_type")
    raw["rope_scaling"] = None if scaling["type"] == "default" else scaling
    found = ModelConfig.from_dict(raw, {})
    assert found == replace(config, eos_token_ids=found.eos_token_ids)  # a tokenizer may name one


@EACH
def test_a_config_without_architectures_is_recognized_by_its_model_type(family):
    directory, _ = family
    raw = json.loads((directory / "config.json").read_text())
    config = ModelConfig.from_dict(raw, {})
    del raw["architectures"]
    assert ModelConfig.from_dict(raw, {}) == config


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window", "qwen3-layers"])
def test_a_window_changes_the_logits(tmp_path, ids, name):
    save_family(tmp_path, name)
    path = tmp_path / "config.json"
    with_window = mixed_logits(tmp_path, ids, TensorParallelGroup())
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": 40}))
    without = mixed_logits(tmp_path, ids, TensorParallelGroup())
    torch.testing.assert_close(with_window[:WINDOW], without[:WINDOW])
    assert (with_window[WINDOW:30] - without[WINDOW:30]).abs().amax(1).min() > 1e-2
