# Modules: specdec.models.heads.formats.eagle3, specdec.models.heads.formats.taps
# Modules: specdec.models.heads.networks.layers, specdec.models.heads.networks.vocabulary
"""EAGLE-3 of every producer against the equations of the paper."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specdec.models.heads.config import HeadConfig, named_target
from tests.specdec.models.heads.driver import (
    HIDDEN,
    KERNELS,
    RANKS_AND_KERNELS,
    VOCAB,
    head_logits,
    save,
    sequences,
    weights,
)
from tests.specdec.models.heads.reference import (
    Layers,
    after_attention,
    attention,
    drafted,
    layer,
    layer_shapes,
    rms,
)

IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB,
}
CONFIG = {**LAYERS, "architectures": ["LlamaForCausalLMEagle3"]}
DEFAULT = (2, 4, 5)  # of 8 layers


def speculators(changes=None, **layers):
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LAYERS | layers,
        **(changes or {}),
    }


def eagle3_weights(
    *, inputs=3, vocab=120, layers=1, extra=None, head=True, hidden=HIDDEN, qk_norm=False
):
    """Return tensors; vocab: of the draft, VOCAB for all. inputs: 0 without fc."""
    shapes = {"fc.weight": (hidden, inputs * HIDDEN)} if inputs else {}
    norms = ("input_layernorm", "hidden_norm")
    shapes |= layer_shapes(Layers(), hidden, 40, 0, 2 * hidden, norms)
    for index in range(1, layers):
        shapes |= layer_shapes(Layers(), hidden, 40, index)
    for index in range(layers if qk_norm else 0):
        shapes |= {f"layers.{index}.self_attn.{n}_norm.weight": (12,) for n in "qk"}
    shapes["norm.weight"] = (hidden,)
    if head:
        shapes["lm_head.weight"] = (vocab, hidden)
    made = weights(shapes | (extra or {}))
    if head and vocab < VOCAB:
        used = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:vocab]
        made["d2t"] = used.sort().values - torch.arange(vocab)
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, used, True)
    return made


def midlayer(made):
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in made.items()}


class Reference:
    """An EAGLE-3 head, with the switches of the producers."""

    def __init__(self, made, target_dir, ids=DEFAULT, sizes=None, **switches):
        self.made, self.ids, self.sizes = made, ids, sizes or Layers()
        self.switches = switches
        self.stored = load_file(target_dir / "model.safetensors")
        self.embedding = made.get("embed_tokens.weight", self.stored["model.embed_tokens.weight"])
        self.num_layers = 1 + max(int(n.split(".")[1]) for n in made if n.startswith("layers."))

    def features(self, part):
        made = self.made
        if not self.ids:
            return part.hidden
        inputs = [part.inputs[:, each] for each in self.ids]
        if "fc_norm.0.weight" in made:
            inputs = [rms(x, made[f"fc_norm.{i}.weight"]) for i, x in enumerate(inputs)]
        x = torch.cat(inputs, dim=1)
        if "input_norm.weight" in made:
            x = rms(x, made["input_norm.weight"])
        return x @ made["fc.weight"].T

    def run(self, tokens, features):
        made = self.made
        embedded, normed = (
            self.embedding[tokens],
            rms(features, made["layers.0.hidden_norm.weight"]),
        )
        if self.switches.get("token_norm", True):
            embedded = rms(embedded, made["layers.0.input_layernorm.weight"])
        both = torch.cat([embedded, normed], dim=1)
        residual = normed if self.switches.get("norm_before_residual") else features
        x = residual + attention(both, made, "layers.0.self_attn", self.sizes)
        x = after_attention(x, made, "layers.0")
        for index in range(1, self.num_layers):
            x = layer(x, made, f"layers.{index}", self.sizes)
        return x

    def normed(self, x):
        return rms(x, self.made["norm.weight"])

    def to_logits(self, x):
        if self.switches.get("final_norm", True):
            x = self.normed(x)
        return x @ self.made.get("lm_head.weight", self.stored["lm_head.weight"]).T

    def logits(self, parts):
        recycle = self.normed if self.switches.get("norm_output") else lambda x: x
        return torch.stack(
            [
                drafted(part, self.features(part), self.run, self.to_logits, recycle, 5)
                for part in parts
            ]
        )


def check(directory, target_dir, reference, parts, **options):
    expected = reference.logits(parts)
    found = head_logits(directory, target_dir, parts, **options)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
@pytest.mark.parametrize("vocab", [120, VOCAB])
def test_midlayer_names(tmp_path, target_dir, vocab, size, kernels):
    made, parts = eagle3_weights(vocab=vocab), sequences()
    config = CONFIG | {"draft_vocab_size": vocab}
    save(tmp_path, config, midlayer(made), "pytorch_model.bin")
    for borders in ((), (4, 9)):
        reference = Reference(made, target_dir)
        options = {"size": size, "kernels": kernels, "borders": borders}
        check(tmp_path, target_dir, reference, parts, **options)


def test_draft_ids_are_offsets(tmp_path, target_dir, target):
    from specdec.models.heads.loading import load_head
    from tests.specdec.models.heads.driver import target_model

    made = eagle3_weights()
    save(tmp_path, CONFIG, midlayer(made))
    config = HeadConfig.from_directory(tmp_path, target)
    head = load_head(config, target_model(target_dir))
    assert torch.equal(head.target_ids, made["t2d"].nonzero()[:, 0])
    assert (head.vocab_size, head.vocab_slice) == (120, range(120))


@pytest.mark.parametrize(
    ("name", "changes", "extra", "switches"),
    [
        ("residual", {"norm_before_residual": True}, {}, {"norm_before_residual": True}),
        ("before-fc", {"norm_before_fc": True}, {"input_norm.weight": (3 * HIDDEN,)}, {}),
        ("fc-norm", {"fc_norm": True}, {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}, {}),
        ("recycled", {"norm_output": True}, {}, {"norm_output": True}),
        (
            "all",
            {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
            {"input_norm.weight": (3 * HIDDEN,)},
            {"norm_before_residual": True, "norm_output": True},
        ),
        ("embedding", {}, {"embed_tokens.weight": (VOCAB, HIDDEN)}, {}),
    ],
)
def test_switches_of_speculators(tmp_path, target_dir, target, name, changes, extra, switches):
    made, parts = eagle3_weights(extra=extra), sequences()
    save(tmp_path, speculators({"draft_vocab_size": 120, **changes}), made)
    check(tmp_path, target_dir, Reference(made, target_dir, **switches), parts, borders=(5,))
    config = HeadConfig.from_directory(tmp_path, target)
    assert config.num_draft_tokens == 4
    assert config.slot_size("cpu") == 3 * target.hidden_size
    assert config.slot_size("cuda") == config.feature_size
    assert config.target_name == named_target(tmp_path) == "org/target"
    assert config.describe()[0].startswith(
        "taken for EAGLE-3 (speculators 0.9): layers enter 2, 4, 5 (output-of 1, 3, 4)"
    )


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        (speculators({IDS: [1, 3, 8]}), (1, 3, 8)),
        (CONFIG | {IDS: [1, 3, 8]}, (1, 3, 8)),
        (CONFIG | {"eagle_config": {IDS: [1, 3, 7]}}, (2, 4, 8)),
        (CONFIG | {"eagle_config": {IDS: [5, 1, 3]}}, (6, 2, 4)),
        (CONFIG | {"eagle_config": {IDS: [1, 1, 3]}}, (2, 2, 4)),
        (CONFIG | {"eagle_config": {IDS: [2, 4, 5]}}, DEFAULT),
        (CONFIG | {"eagle_config": {IDS: [2, 5, 8]}}, (2, 5, 8)),
        (CONFIG | {"target_layer_ids": [-1, 3, 7]}, (0, 4, 8)),
        (CONFIG | {"eagle_config": {IDS: None}}, DEFAULT),
    ],
)
def test_layers_of_the_target_in_both_numberings(tmp_path, target_dir, target, config, ids):
    made, parts = eagle3_weights(), sequences()
    save(tmp_path, config, made)
    found = HeadConfig.from_directory(tmp_path, target)
    assert found.taps == tuple(sorted(set(ids)))
    has_ids = config.get("eagle_config") != {IDS: None}
    assert any("names no layers" in each for each in found.reading.notes) is not has_ids
    check(tmp_path, target_dir, Reference(made, target_dir, ids), parts)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_another_number_of_layers(tmp_path, target_dir, count):
    made, parts = eagle3_weights(inputs=count), sequences()
    save(tmp_path, speculators({IDS: list(range(1, count + 1))}), made)
    check(tmp_path, target_dir, Reference(made, target_dir, range(1, count + 1)), parts)


def test_final_hidden_state_as_the_feature(tmp_path, target_dir, target):
    made, parts = eagle3_weights(inputs=0), sequences()
    save(tmp_path, CONFIG | {"eagle_config": {"use_aux_hidden_state": False}}, midlayer(made))
    config = HeadConfig.from_directory(tmp_path, target)
    assert config.taps == ()
    assert config.slot_size("cpu") == config.slot_size("cuda") == target.hidden_size
    check(tmp_path, target_dir, Reference(made, target_dir, ()), parts, size=2, borders=(7,))


def test_legacy_names_of_the_norms_before_fc(tmp_path, target_dir):
    names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    made = eagle3_weights(extra={f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)})
    parts, stored = sequences(), midlayer(made)
    for i, name in enumerate(names):
        stored[f"{name}.weight"] = stored.pop(f"fc_norm.{i}.weight")
    save(tmp_path, CONFIG | {"use_aux_norm": True}, stored)
    check(tmp_path, target_dir, Reference(made, target_dir), parts)


@pytest.mark.parametrize("is_recycled", [True, False])
def test_norm_output_of_eagle_3_1_recycles_the_normalized_output(tmp_path, target_dir, is_recycled):
    made, parts = eagle3_weights(), sequences()
    save(tmp_path, CONFIG | {"norm_output": is_recycled}, midlayer(made))
    check(tmp_path, target_dir, Reference(made, target_dir, norm_output=is_recycled), parts)


@pytest.mark.parametrize("kind", ["mrope", "default"])
def test_rotation_by_the_axes_of_images_is_that_of_text(tmp_path, target_dir, kind):
    made, parts = eagle3_weights(), sequences()
    scaling = {"rope_scaling": {"rope_type": kind, "mrope_section": [2, 2, 2]}}
    save(tmp_path, CONFIG | scaling, midlayer(made))
    check(tmp_path, target_dir, Reference(made, target_dir), parts)


HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "parameters",
    [HALF, {"full_attention": {"rope_type": "default"}, "sliding_attention": HALF}],
    ids=["all", "by-type"],
)
def test_the_factor_of_the_target_rotates_no_part(tmp_path, target_dir, parameters, kernels):
    """The file repeats the target's parameters, and the head is trained on whole heads."""
    made, parts = eagle3_weights(), sequences()
    save(tmp_path, speculators(rope_parameters=parameters, rope_theta=None), made)
    check(tmp_path, target_dir, Reference(made, target_dir), parts, kernels=kernels)


@pytest.mark.parametrize(
    ("key", "switch", "unused"),
    [
        ("use_last_layernorm", "final_norm", "norm.weight"),
        ("use_input_layernorm_in_first_layer", "token_norm", "layers.0.input_layernorm.weight"),
    ],
)
def test_switches_of_modelopt(tmp_path, target_dir, key, switch, unused):
    made, parts = eagle3_weights(), sequences()
    del made[unused], made["t2d"]
    save(tmp_path, CONFIG | {"eagle_config": {key: False}}, made, "pytorch_model.bin")
    check(tmp_path, target_dir, Reference(made, target_dir, **{switch: False}), parts)


def test_parallel_heads_of_modelopt_are_not_used(tmp_path, target_dir, target):
    made, parts = eagle3_weights(), sequences()
    extra = {f"parallel_draft_heads.0.medusa_layers.0.linear.{n}": torch.ones(1) for n in "wb"}
    save(tmp_path, CONFIG, made | extra)
    check(tmp_path, target_dir, Reference(made, target_dir), parts)
    description = HeadConfig.from_directory(tmp_path, target).describe()
    assert description[1].startswith("its parallel_draft_heads are not used")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("norm", ["input_layernorm", "hidden_norm"])
def test_several_layers(tmp_path, target_dir, norm, kernels):
    made, parts = eagle3_weights(layers=3), sequences()
    stored = {
        name.replace("input_layernorm", norm) if not name.startswith("layers.0") else name: tensor
        for name, tensor in made.items()
    }
    save(tmp_path, speculators(num_hidden_layers=3), stored)
    reference = Reference(made, target_dir)
    check(tmp_path, target_dir, reference, parts, size=2, kernels=kernels, borders=(6, 14))


@pytest.mark.parametrize("size", [1, 2])
def test_window_of_the_layers(tmp_path, target_dir, target, size):
    made, parts = eagle3_weights(), sequences()
    config = speculators(layer_types=["sliding_attention"], sliding_window=5)
    save(tmp_path, config, made)
    reference = Reference(made, target_dir, sizes=Layers(window=5))
    check(tmp_path, target_dir, reference, parts, size=size, borders=(7,))
    assert "window 5" in HeadConfig.from_directory(tmp_path, target).describe()[0]


def test_the_targets_output_head(tmp_path, target_dir):
    made, parts = eagle3_weights(head=False), sequences()
    save(tmp_path, CONFIG | {"draft_vocab_size": None}, midlayer(made))
    check(tmp_path, target_dir, Reference(made, target_dir), parts, size=2)


def test_deepspec(tmp_path, target_dir, target):
    """Five layers of the target, norms of queries and keys, full vocabulary, own copies."""
    extra = {"embed_tokens.weight": (VOCAB, HIDDEN)}
    made, parts = eagle3_weights(inputs=5, vocab=VOCAB, extra=extra, qk_norm=True), sequences()
    config = {
        **LAYERS,
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "target_layer_ids": [0, 2, 4, 5, 6],
    }
    save(tmp_path, config, made)
    check(tmp_path, target_dir, Reference(made, target_dir, (1, 3, 5, 6, 7)), parts, size=2)
    assert "(DeepSpec)" in HeadConfig.from_directory(tmp_path, target).describe()[0]


def test_a_narrower_head(tmp_path, target_dir):
    """Its own width needs its own embedding and output head."""
    hidden = 32
    made = eagle3_weights(hidden=hidden, extra={"embed_tokens.weight": (VOCAB, hidden)})
    config = CONFIG | {"hidden_size": hidden, "head_dim": 12, "target_hidden_size": HIDDEN}
    save(tmp_path, config, midlayer(made))
    check(tmp_path, target_dir, Reference(made, target_dir), sequences(), size=2, borders=(9,))


def test_sizes(tmp_path, target):
    made = eagle3_weights()
    save(tmp_path, CONFIG, midlayer(made))
    config = HeadConfig.from_directory(tmp_path, target)
    assert (config.method, config.taps, config.feature_size) == ("eagle3", DEFAULT, HIDDEN)
    assert (config.draft_vocab_size, config.num_kv_layers) == (120, 1)
    floats = sum(each.numel() for each in made.values() if each.is_floating_point())
    assert config.weight_bytes("bfloat16") == 2 * (floats + 120)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == HIDDEN
