# Modules: specdec.models.config.transformers_config
# Modules: specdec.models.transformers.transformers_attention
"""Models that transformers' modelling code runs, over paged KV: the same logits and tokens."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec.config.engine import ModelOptions
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.reference.forward_batch import SlotMove
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.llama import CausalDecoder
from specdec.models.loading import load_model
from specdec.models.transformers.transformers_decoder import TransformersDecoder
from specdec.speculation.proposers import make_proposer
from specdec.types.errors import UnsupportedModelError
from tests.specdec.engines import draft_model, engine_config, local_engine, request, tokens_by
from tests.specdec.models.families import BY_TRANSFORMERS, NOT_BY_TRANSFORMERS, WINDOW, save_family
from tests.specdec.models.foreign import (
    FOREIGN,
    IN_MAKE_TEST,
    reference_logits,
    save_foreign,
)
from tests.specdec.models.passes import BLOCK_SIZE, batch_of, in_pass_order
from tests.specdec.tiny import disturbed_llama_dir, train_tokenizer

TOLERANCE = 1e-4


def each_model(quick):
    """Parametrize a test with all models; those that are not quick are slow tests."""
    slow = pytest.mark.slow
    names = [each if each in quick else pytest.param(each, marks=slow) for each in FOREIGN]
    return pytest.mark.parametrize("name", names)


def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 383, (40,), generator=generator).tolist() for _ in range(2)]


def load(directory, model_impl="auto", group=None, divides_by_expert=False, **changes):
    options = ModelOptions(model_impl, divides_by_expert=divides_by_expert)
    config = ModelConfig.from_directory(directory, options)
    values = {"dtype": torch.float32, "max_model_len": 128, "block_size": BLOCK_SIZE, **changes}
    return load_model(directory, config, group or TensorParallelGroup(), **values)


def mixed_logits(model, ids):
    """Return the logits of passes with prefill, decode and several rows, as `in_pass_order`."""
    cache = model.new_kv_cache(40 * BLOCK_SIZE)
    first, second = list(range(3, 20)), list(range(39, 24, -1))
    a, b = ids
    parts = [[(a[:30], 0, first)], [(a[:33], 30, first), (b[:20], 0, second)]]
    parts.append([(a[:34], 33, first), (b[:27], 20, second)])
    return torch.cat([model.compute_logits(model(batch_of(part), cache)) for part in parts])


@each_model(IN_MAKE_TEST)
def test_logits_equal_transformers(tmp_path, name):
    save_foreign(tmp_path, name)
    model, ids = load(tmp_path), sequences()
    assert isinstance(model, TransformersDecoder)
    expected = in_pass_order(reference_logits(tmp_path, ids))
    found = mixed_logits(model, ids)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_families_of_the_registry_have_the_same_logits(tmp_path, name):
    save_family(tmp_path, name)
    model, ids = load(tmp_path, "transformers"), sequences()
    assert isinstance(model, TransformersDecoder)
    expected = in_pass_order(reference_logits(tmp_path, ids))
    found = mixed_logits(model, ids)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("name", "reason"), list(NOT_BY_TRANSFORMERS.items()))
def test_other_families_of_the_registry_are_refused(tmp_path, name, reason):
    save_family(tmp_path, name)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path, "transformers")


def test_latent_attention_is_the_same_expanded_and_absorbed(tmp_path):
    save_family(tmp_path, "deepseek-v3")
    expanded, absorbed = load(tmp_path, "transformers"), load(tmp_path)
    caches = [each.new_kv_cache(4) for each in (expanded, absorbed)]
    assert caches[0].shape[-2:] == (9, 24)
    assert caches[1].numel() == 3 * 4 * 40  # a latent of 34 and 6 rotated dimensions a token
    ids = sequences()
    torch.testing.assert_close(
        mixed_logits(expanded, ids), mixed_logits(absorbed, ids), atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_a_native_architecture_runs_by_either_implementation(tmp_path, family):
    save_family(tmp_path, family)
    foreign, own = load(tmp_path, "transformers"), load(tmp_path, "specdec", kernels="torch")
    assert isinstance(foreign, TransformersDecoder)
    assert isinstance(own, CausalDecoder)
    assert {layer.window for layer in foreign.layers} == {None, WINDOW}
    first = foreign.layers[0]
    assert (first.softcap, first.has_sinks) == (
        (3.0, False) if family == "gemma2" else (None, True)
    )
    ids = sequences()
    torch.testing.assert_close(
        mixed_logits(foreign, ids), mixed_logits(own, ids), atol=TOLERANCE, rtol=TOLERANCE
    )


def test_16_bit_logits_are_float32_and_close(tmp_path):
    save_foreign(tmp_path, "gpt2")
    ids = sequences()
    found = mixed_logits(load(tmp_path, dtype=torch.bfloat16), ids)
    assert found.dtype == torch.float32
    expected = in_pass_order(reference_logits(tmp_path, ids))
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99


def test_a_draft_window_narrows_the_windows_of_the_layers(tmp_path):
    save_foreign(tmp_path, "vault-gemma")
    config = ModelConfig.from_directory(tmp_path).with_window(5)
    model = load_model(
        tmp_path,
        config,
        TensorParallelGroup(),
        dtype=torch.float32,
        max_model_len=64,
        block_size=4,
        output_tokens=[3, 8],
    )
    assert {layer.window for layer in model.layers} == {5}
    logits = model.compute_logits(torch.ones(2, config.hidden_size))
    assert logits.isfinite().nonzero()[:, 1].tolist() == [3, 8, 3, 8]


def test_kv_moves_between_slots(tmp_path):
    save_foreign(tmp_path, "gpt2")
    model = load(tmp_path)
    cache = model.new_kv_cache(4 * BLOCK_SIZE)
    model(batch_of([(sequences()[0][:6], 0, [0, 1])]), cache)
    before = cache.clone()
    model.move_kv(cache, [SlotMove(4, 2), SlotMove(5, 3)])
    assert torch.equal(cache[:, [2, 3]], before[:, [4, 5]])
    assert torch.equal(cache[:, [0, 1]], before[:, [0, 1]])


def requests():
    prompts = [[(29 * i + 31 * j) % 380 + 3 for j in range(6)] * (2 + 2 * i) for i in range(4)]
    return [
        request(f"r{i}", prompt, seed=i, temperature=0.8 * (i % 2), max_tokens=12)
        for i, prompt in enumerate(prompts)
    ]


def speculating(directory, method, **keys):
    """Return an engine with room for few of the requests."""
    speculation = SpeculativeConfig.of(num_speculative_tokens=3, method=method, **keys)
    drafting = draft_model(Path(keys["model"]), max_model_len=60) if "model" in keys else None
    config = engine_config(speculation=speculation, num_blocks=20, max_model_len=64)
    return local_engine(directory, config, proposer=make_proposer(speculation, drafting))


@each_model(["vault-gemma"])
def test_speculation_preemption_and_prefix_hits_change_no_token(tmp_path, name):
    target, draft = tmp_path / "target", tmp_path / "draft"
    save_foreign(target, name)
    train_tokenizer(383).save_pretrained(target)
    draft.mkdir()
    disturbed_llama_dir(target, draft, share=0.05)
    expected = tokens_by(local_engine(target, engine_config(0)), requests())
    lookups = {"method": "ngram", "prompt_lookup_min": 1}
    for keys in (lookups, {"method": "draft_model", "model": str(draft)}):
        engine = speculating(target, **keys)
        for order in (1, -1):
            assert tokens_by(engine, requests()[::order]) == expected
        counts = engine.stats().counts
        assert counts.num_preemptions > 0
        assert counts.num_cached_tokens > 0
        assert counts.speculation.num_draft_tokens > 0
    assert counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("model", "config", "reason"),
    [
        ("MambaForCausalLM", "MambaConfig", "state-space"),
        ("GPTJForCausalLM", "GPTJConfig", "takes no attention function"),
        ("BartForConditionalGeneration", "BartConfig", "encoder-decoder"),
    ],
)
def test_what_the_configuration_shows_is_refused(tmp_path, model, config, reason):
    raw = getattr(transformers, config)(architectures=[model]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=reason):
        ModelConfig.from_directory(tmp_path)


LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("phi", LONG_ROPE, "LongRoPE"),
        ("vault-gemma", {"is_causal": False}, "neither causal nor"),
        ("ministral", {"num_key_value_heads": 6}, None),
    ],
)
def test_what_loading_shows_is_refused(tmp_path, name, changes, reason):
    save_foreign(tmp_path, name, **changes)
    if reason is None:
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace('"head_dim": 16', '"head_dim": 8'))
        reason = "cannot load"
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


def test_long_rope_of_one_type_of_layers_is_refused(tmp_path):
    default = {"rope_type": "default", "rope_theta": 1e4}
    by_type = {"sliding_attention": default, "full_attention": LONG_ROPE["rope_parameters"]}
    save_family(tmp_path, "gemma3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": by_type}))
    with pytest.raises(UnsupportedModelError, match="LongRoPE"):
        ModelConfig.from_directory(tmp_path, ModelOptions("transformers"))


def test_a_missing_tensor_is_named(tmp_path):
    save_foreign(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"no tensor transformer\.h\.1\.mlp\.c_fc"):
        load(tmp_path)


def test_codes_are_refused_and_unused_tensors_named(tmp_path, caplog):
    save_foreign(tmp_path, "gpt2")
    path, name = tmp_path / "model.safetensors", "transformer.h.1.mlp.c_fc.weight"
    tensors = load_file(path)
    save_file(tensors | {"extra": torch.ones(1)}, path, metadata={"format": "pt"})
    load(tmp_path)
    assert "nothing reads 1 tensors, extra (1)" in caplog.text
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"{name} has codes of type I8"):
        load(tmp_path)


def test_code_of_a_repository_is_refused(tmp_path):
    raw = {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoModel": "x"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for model_impl in ("auto", "specdec"):
        with pytest.raises(UnsupportedModelError, match="code of its repository"):
            ModelConfig.from_directory(tmp_path, ModelOptions(model_impl))


@pytest.mark.parametrize("name", IN_MAKE_TEST)
def test_a_config_without_architectures_is_recognized_by_its_model_type(tmp_path, name):
    save_foreign(tmp_path, name)
    config = ModelConfig.from_directory(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["architectures"]
    path.write_text(json.dumps(raw))
    assert ModelConfig.from_directory(tmp_path) == config


def test_the_implementation_is_that_of_the_setting(tmp_path):
    save_foreign(tmp_path, "gpt2")
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not supported"):
        ModelConfig.from_directory(tmp_path, ModelOptions("specdec"))
    found = ModelConfig.from_directory(tmp_path)
    assert found.transformers is not None
    assert found.num_parameters == found.transformers.num_parameters
    assert found.weight_bytes("float32") == 4 * found.num_parameters
    assert found.kv_bytes_per_token("float32") == 2 * 3 * 6 * 16 * 4
