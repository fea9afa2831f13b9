# Modules: specdec.models.heads.formats.dflash, specdec.models.heads.networks.markov
"""DFlash and DSpark, both meanings of a block, against a reference over the whole sequence."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from specdec.models.heads.config import HeadConfig
from tests.specdec.models.heads.driver import (
    HIDDEN,
    KERNELS,
    RANKS_AND_KERNELS,
    VOCAB,
    draft_logits,
    head_logits,
    save,
    selected_logits,
    sequences,
    weights,
)
from tests.specdec.models.heads.reference import (
    Layers,
    after_attention,
    attend,
    layer_shapes,
    linear,
    qkv,
    rms,
    rope,
    rope_of_neighbours,
)

MASK, BLOCK, RANK = 17, 6, 8
IDS = (2, 4, 6)  # input-of
LAYERS = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB,
}
OUTPUT_OF = [each - 1 for each in IDS]
Z_LAB = {
    **LAYERS,
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": OUTPUT_OF},
}
DEEPSPEC = {
    **LAYERS,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": OUTPUT_OF,
    "markov_rank": 0,
}


def speculators(kind, **changes):
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9",
        "transformer_layer_config": LAYERS,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": list(IDS),
        **changes,
    }


def block_weights(extra=None, vocab=None):
    shapes = {"fc.weight": (HIDDEN, len(IDS) * HIDDEN)}
    shapes |= dict.fromkeys(("hidden_norm.weight", "norm.weight"), (HIDDEN,))
    for index in range(2):
        shapes |= layer_shapes(Layers(), HIDDEN, 40, index)
        shapes |= {f"layers.{index}.self_attn.{n}_norm.weight": (12,) for n in "qk"}
    if vocab:
        shapes["lm_head.weight"] = (vocab, HIDDEN)
    return weights(shapes | (extra or {}))


def visibility(count, causal, window):
    """Return what the slots of a block see of `count` features and the block, [BLOCK, S]."""
    positions = torch.arange(count + BLOCK)
    rows, cols = positions[count:, None], positions[None]
    visible = torch.ones(BLOCK, count + BLOCK, dtype=torch.bool)
    visible &= ~(cols > rows) if causal else visible
    return visible & (cols > rows - window) if window else visible


def outputs(
    made,
    part,
    target_dir,
    *,
    causal=(False, False),
    windows=(None, None),
    neighbours=False,
    scale=1.0,
):
    """Return the normed outputs of all slots, [BLOCK, HIDDEN], and the output head.

    causal, windows: of each layer. neighbours: whether rotary pairs are neighbours. scale: of
    embeddings.
    """
    own = load_file(target_dir / "model.safetensors")
    embedding = made.get("embed_tokens.weight", own["model.embed_tokens.weight"])
    inputs = torch.cat([part.inputs[:, each] for each in IDS], dim=1)
    context = rms(inputs @ made["fc.weight"].T, made["hidden_norm.weight"])
    count, sizes = len(context), Layers()
    positions = torch.arange(count + BLOCK).float()
    x = embedding[torch.tensor([part.tokens[-1]] + [MASK] * (BLOCK - 1))] * scale
    for index in range(2):
        visible = visibility(count, causal[index], windows[index])
        prefix = f"layers.{index}"
        normed = rms(x, made[f"{prefix}.input_layernorm.weight"])
        both = torch.cat([context, normed])
        query, key, value = qkv(both, made, f"{prefix}.self_attn", sizes)
        query, key = (
            rope_of_neighbours(each, 10_000.0) if neighbours else rope(each, positions, 10_000.0)
            for each in (query, key)
        )
        attended = attend(query[count:], key, value, visible)
        x = x + linear(attended, made, f"{prefix}.self_attn.o_proj")
        x = after_attention(x, made, prefix)
    return rms(x, made["norm.weight"]), made.get("lm_head.weight", own["lm_head.weight"])


def reference(made, parts, target_dir, *, from_anchor=False, bias=None, **switches):
    """Return logits [B, K, V]. bias: of outputs [K, H] and the tokens before, a Markov head."""
    found = []
    for part in parts:
        x, head = outputs(made, part, target_dir, **switches)
        x = x if from_anchor else x[1:]
        logits = x @ head.T
        if bias is not None:
            logits = logits + bias(x, [part.tokens[-1], *part.drafts[: len(x) - 1]])
        found.append(logits)
    return torch.stack(found)


def check(directory, target_dir, expected, parts, **options):
    found = head_logits(directory, target_dir, parts, **options)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


PARTS = sequences(num_drafts=BLOCK)


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
@pytest.mark.parametrize(
    ("config", "from_anchor"),
    [
        (Z_LAB, False),
        (DEEPSPEC, True),
        (speculators("dflash"), False),
        (speculators("dflash", sample_from_anchor=True), True),
        (speculators("dspark", sample_from_anchor=True), True),
    ],
    ids=["z-lab", "deepspec", "dflash", "anchor", "dspark"],
)
def test_what_a_slot_predicts(tmp_path, target_dir, target, config, from_anchor, size, kernels):
    made = block_weights()
    save(tmp_path, config, made)
    head = HeadConfig.from_directory(tmp_path, target)
    assert head.method == ("dspark" if from_anchor else "dflash")
    assert head.max_draft_tokens == (BLOCK if from_anchor else BLOCK - 1)
    assert (head.taps, head.feature_size, head.num_kv_layers) == (IDS, HIDDEN, 2)
    expected = reference(made, PARTS, target_dir, from_anchor=from_anchor)
    options = {"size": size, "kernels": kernels}
    check(tmp_path, target_dir, expected, PARTS, **options)
    check(tmp_path, target_dir, expected, PARTS, borders=(5, 12), **options)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("key", ["rope_is_neox_style", "is_neox_style"])
def test_rotary_pairs_may_be_neighbours(tmp_path, target_dir, key, kernels):
    made = block_weights()
    save(tmp_path, DEEPSPEC | {key: False}, made)
    expected = reference(made, PARTS, target_dir, from_anchor=True, neighbours=True)
    check(tmp_path, target_dir, expected, PARTS, kernels=kernels)


def test_the_factor_of_the_target_rotates_no_part(tmp_path, target_dir):
    made, sections = block_weights(), {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, **sections}
    save(tmp_path, Z_LAB | {"rope_theta": None, "rope_parameters": rotary}, made)
    check(tmp_path, target_dir, reference(made, PARTS, target_dir), PARTS)


def test_pickled_files_of_z_lab(tmp_path, target_dir):
    made = block_weights()
    save(tmp_path, Z_LAB, made, "pytorch_model.bin")
    check(tmp_path, target_dir, reference(made, PARTS, target_dir), PARTS)


WINDOWED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
FULL = {"layer_types": ["full_attention"] * 2}
BOTH = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}


def z_lab(changes, **nested):
    return {**Z_LAB, **changes, "dflash_config": Z_LAB["dflash_config"] | nested}


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
@pytest.mark.parametrize(
    ("config", "causal", "windows"),
    [
        (z_lab(BOTH, causal=True), (True, True), (5, 5)),
        (z_lab(BOTH), (True, True), (5, 5)),
        (z_lab(WINDOWED), (False, True), (None, 5)),
        (z_lab(BOTH, causal=False), (False, False), (5, 5)),
        (z_lab(BOTH | {"is_causal": False}), (False, False), (5, 5)),
        (z_lab({"is_causal": True}), (True, True), (None, None)),
        (z_lab({}, causal=True), (True, True), (None, None)),
        (z_lab({}, is_causal=True), (True, True), (None, None)),
        (z_lab({}, use_swa=True, swa_window_size=5), (False, False), (5, 5)),
        (z_lab(FULL, use_swa=True, swa_window_size=5), (False, False), (5, 5)),
        (z_lab({}, use_swa=False, swa_window_size=5), (False, False), (None, None)),
        (
            z_lab(WINDOWED | {"sliding_window": None}, use_swa=True, swa_window_size=7),
            (False, True),
            (None, 7),
        ),
        (
            speculators("dflash", transformer_layer_config=LAYERS | WINDOWED),
            (False, False),
            (None, 5),
        ),
        (
            speculators(
                "dflash",
                transformer_layer_config=LAYERS | WINDOWED,
                sliding_window_non_causal=False,
            ),
            (False, True),
            (None, 5),
        ),
    ],
)
def test_causal_blocks_and_windows(tmp_path, target_dir, size, kernels, config, causal, windows):
    made = block_weights()
    save(tmp_path, config, made)
    expected = reference(made, PARTS, target_dir, causal=causal, windows=windows)
    check(tmp_path, target_dir, expected, PARTS, size=size, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("config", "has_embedding", "scale"),
    [(Z_LAB, False, 3.0), (Z_LAB, True, 1.0), (speculators("dflash"), False, 1.0)],
)
def test_the_embeddings_of_gemma_are_multiplied(
    tmp_path, target_dir, target, config, has_embedding, scale, kernels
):
    """In the target's table as transformers has it, and not in tables of the head."""
    gemma = replace(target.traits, embedding_scale=3.0, rounds_embedding_scale=True)
    made = block_weights({"embed_tokens.weight": (VOCAB, HIDDEN)} if has_embedding else None)
    save(tmp_path, config, made)
    head = HeadConfig.from_directory(tmp_path, replace(target, traits=gemma))
    expected = reference(made, PARTS, target_dir, scale=scale)
    found = draft_logits(head, target_dir, PARTS, kernels=kernels)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_a_draft_window_makes_no_layer_causal(tmp_path, target_dir, target):
    made, layers = block_weights(), LAYERS | WINDOWED
    config = speculators("dflash", transformer_layer_config=layers, sliding_window_non_causal=False)
    save(tmp_path, config, made)
    head = HeadConfig.from_directory(tmp_path, target, draft_window=6)
    assert (
        "window 6, blocks of 6, each mask predicts its own token, causal blocks in layers 1,"
        in (head.describe()[0])
    )
    expected = reference(made, PARTS, target_dir, causal=(False, True), windows=(6, 6))
    found = draft_logits(head, target_dir, PARTS)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_the_anchor_may_be_named_in_dflash_config(tmp_path, target_dir):
    """As in a published DSpark head whose slots predict their own tokens."""
    made = block_weights()
    config = DEEPSPEC | {"dflash_config": {"sample_from_anchor": False}}
    save(tmp_path, config, made)
    check(tmp_path, target_dir, reference(made, PARTS, target_dir), PARTS)


def test_default_layers_are_evenly_spaced(tmp_path, target):
    config = {**Z_LAB, "dflash_config": {"mask_token_id": MASK}}
    save(tmp_path, config, block_weights())
    found = HeadConfig.from_directory(tmp_path, target)
    assert found.taps == (2, 4, 6)
    assert found.reading.notes == (
        "config.json names no layers of the target: the default is assumed (layers enter 2, 4, 6 "
        "(output-of 1, 3, 5))",
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_reduced_vocabulary(tmp_path, target_dir, target, kernels):
    made = block_weights(vocab=100)
    made["d2t"] = torch.arange(100) * 2
    save(tmp_path, speculators("dflash", draft_vocab_size=100), made)
    expected = reference(made, PARTS, target_dir)
    check(tmp_path, target_dir, expected, PARTS, size=2, kernels=kernels)
    assert HeadConfig.from_directory(tmp_path, target).draft_vocab_size == 100


MARKOV = {
    "vanilla": {},
    "gated": {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)},
    "rnn": {"joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN)},
}


def markov_bias(kind, made):
    """Return the bias of the logits as a function of outputs and the tokens before."""
    made = {name.removeprefix("markov_head."): tensor for name, tensor in made.items()}

    def bias(x, tokens):
        state, rows = torch.zeros(RANK), []
        for h, token in zip(x, tokens, strict=True):
            w1 = made["markov_w1.weight"][token]
            if kind == "gated":
                both = torch.cat([h, w1])
                w1 = torch.sigmoid(made["gate_proj.weight"] @ both + made["gate_proj.bias"]) * w1
            if kind == "rnn":
                z = torch.cat([state, w1, h])
                gate, new, out = (part @ z for part in made["joint_proj.weight"].split(RANK))
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
                w1 = torch.tanh(out)
            rows.append(made["markov_w2.weight"] @ w1)
        return torch.stack(rows)

    return bias


def save_dspark(directory, kind, file="model.safetensors"):
    """Write a DSpark file with copies of embedding and head, and a confidence head."""
    shapes = {
        "markov_w1.weight": (VOCAB, RANK),
        "markov_w2.weight": (VOCAB, RANK),
        **MARKOV[kind],
    }
    extra = {f"markov_head.{name}": shape for name, shape in shapes.items()}
    extra |= {"embed_tokens.weight": (VOCAB, HIDDEN)}
    extra |= {"confidence_head.proj.weight": (1, HIDDEN + RANK), "confidence_head.proj.bias": (1,)}
    made = block_weights(extra, vocab=VOCAB)
    config = DEEPSPEC | {"markov_rank": RANK, "markov_head_type": kind}
    save(directory, config, made, file)
    return made


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
@pytest.mark.parametrize("kind", MARKOV)
def test_markov_heads(tmp_path, target_dir, kind, size, kernels):
    made = save_dspark(
        tmp_path, kind, "pytorch_model.bin" if kind == "rnn" else "model.safetensors"
    )
    bias = markov_bias(kind, made)
    expected = reference(made, PARTS, target_dir, from_anchor=True, bias=bias)
    check(tmp_path, target_dir, expected, PARTS, size=size, kernels=kernels, borders=(7,))
    found = selected_logits(tmp_path, target_dir, PARTS)
    torch.testing.assert_close(found, expected[-1:], atol=2e-4, rtol=1e-4)


def test_the_markov_head_of_older_files_of_specforge(tmp_path, target):
    made = save_dspark(tmp_path / "new", "vanilla")
    prefix = re.compile("markov_head|confidence_head")
    older = {prefix.sub(r"logit_head.\g<0>", name): tensor for name, tensor in made.items()}
    save(tmp_path / "old", DEEPSPEC | {"markov_rank": RANK}, older)
    new, old = (HeadConfig.from_directory(tmp_path / each, target) for each in ("new", "old"))
    assert old.shape == new.shape


def test_description(tmp_path, target):
    save_dspark(tmp_path, "gated")
    assert HeadConfig.from_directory(tmp_path, target).describe() == (
        "taken for DSpark (DeepSpec): layers enter 2, 4, 6 (output-of 1, 3, 5), layers: 2, full "
        "attention, blocks of 6, each slot predicts the next token, gated Markov head of rank 8, "
        "383 draft tokens",
    )
