"""MTP layers with latent attention and mixtures of experts, in the checkpoint of such a target.

That of DeepSeek-V3.2 drafts without its indexer.
"""

import json
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec.kernels.cpu import native_library
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.networks.native import NativeHead
from specdec.types.errors import UnsupportedModelError
from tests.specdec.models.heads import reference
from tests.specdec.models.heads.driver import (
    HIDDEN,
    KERNELS,
    VOCAB,
    draft_logits,
    head_logits,
    sequences,
    weights,
)
from tests.specdec.models.heads.formats.test_mtp import with_mtp
from tests.specdec.models.heads.native_drafts import WholeDrafts, make_head
from tests.specdec.models.heads.reference import Latents, Layers, Mixture, drafted, rms
from tests.specdec.packing import float8
from tests.specdec.tiny import random_model

LAYERS, EXPERTS, UNITS = 2, 6, 20
PREFIX = f"model.layers.{LAYERS}."
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "moe_intermediate_size": UNITS,
    "num_experts_per_tok": 3,
    "eos_token_id": 0,
}
LATENT_SIZES = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 9,
    "n_routed_experts": EXPERTS,
    "first_k_dense_replace": 1,
}
LATENTS = Latents(heads=4, rank=14, plain_dim=10, rope_dim=6, value_dim=9)


def latent_shapes(query_rank):
    query = {"q_proj": (4 * 16, HIDDEN)}
    if query_rank:
        query = {"q_a_proj": (query_rank, HIDDEN), "q_b_proj": (4 * 16, query_rank)}
        query["q_a_layernorm"] = (query_rank,)
    return query | {
        "kv_a_proj_with_mqa": (20, HIDDEN),
        "kv_a_layernorm": (14,),
        "kv_b_proj": (4 * 19, 14),
        "o_proj": (HIDDEN, 4 * 9),
    }


@dataclass(frozen=True)
class Kind:
    """A target and its MTP layer.

    config: of transformers, with its class. attention: shapes of its tensors. sizes: of the
    reference's attention. mixture: None for an MLP.
    """

    model: str
    config: dict
    attention: dict
    sizes: object
    mixture: Mixture | None
    has_shared: bool = False

    def shapes(self):
        linears = {f"self_attn.{name}": shape for name, shape in self.attention.items()}
        mlps = {"mlp": 40}
        if self.mixture is not None:
            linears["mlp.gate"] = (EXPERTS, HIDDEN)
            mlps = {f"mlp.experts.{index}": UNITS for index in range(EXPERTS)}
            mlps |= {"mlp.shared_experts": UNITS} if self.has_shared else {}
        for name, units in mlps.items():
            linears |= dict.fromkeys((f"{name}.gate_proj", f"{name}.up_proj"), (units, HIDDEN))
            linears[f"{name}.down_proj"] = (HIDDEN, units)
        norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm")
        linears |= dict.fromkeys((*norms, "shared_head.norm"), (HIDDEN,))
        linears |= {"eh_proj": (HIDDEN, 2 * HIDDEN)}
        linears |= dict.fromkeys(("shared_head.head", "embed_tokens"), (VOCAB, HIDDEN))
        shapes = {f"{name}.weight": shape for name, shape in linears.items()}
        if self.mixture is not None and self.mixture.is_sigmoid:
            shapes["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
        return shapes

    def layer(self, x, made):
        """Return the output of the decoder layer by the equations of the papers."""
        attend = reference.latent_attention if self.has_latents else reference.attention
        normed = rms(x, made["input_layernorm.weight"], 1e-6)
        x = x + attend(normed, made, "self_attn", self.sizes)
        normed = rms(x, made["post_attention_layernorm.weight"], 1e-6)
        if self.mixture is None:
            return x + reference.mlp(normed, made, "mlp")
        return x + reference.mixture(normed, made, "mlp", self.mixture)

    @property
    def has_latents(self):
        return isinstance(self.sizes, Latents)


V3 = Kind(
    "DeepseekV3",
    {
        **LATENT_SIZES,
        "q_lora_rank": 11,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    latent_shapes(11),
    LATENTS,
    Mixture(EXPERTS, 3, groups=3, chosen_groups=2, scale=2.5),
    has_shared=True,
)
KINDS = {
    "deepseek-v3": V3,
    "deepseek-v3.2": replace(
        V3,
        model="DeepseekV32",
        config={**V3.config, "index_topk": 3, "index_head_dim": 8, "index_n_heads": 2},
        attention=latent_shapes(11)
        | {"indexer.wq_b": (16, 11), "indexer.wk": (8, HIDDEN), "indexer.k_norm": (8,)},
    ),
    "deepseek-v3-dense": replace(V3, mixture=None, has_shared=False),
    "deepseek-v2": Kind(
        "DeepseekV2",
        {**LATENT_SIZES, "q_lora_rank": None, "n_shared_experts": 1, "routed_scaling_factor": 1.5},
        latent_shapes(None),
        LATENTS,
        Mixture(EXPERTS, 3, is_sigmoid=False, normalizes=False, scale=1.5),
        has_shared=True,
    ),
    "qwen3-moe": Kind(
        "Qwen3Moe",
        {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "num_experts": EXPERTS},
        {
            "q_proj": (64, HIDDEN),
            "k_proj": (32, HIDDEN),
            "v_proj": (32, HIDDEN),
            "o_proj": (HIDDEN, 64),
            "q_norm": (16,),
            "k_norm": (16,),
        },
        Layers(head_dim=16),
        Mixture(EXPERTS, 3, is_sigmoid=False, normalizes=False),
    ),
    "glm4-moe": Kind(
        "Glm4Moe",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "n_routed_experts": EXPERTS,
            "use_qk_norm": True,
            "rms_norm_eps": 1e-6,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        {
            "q_proj": (64, HIDDEN),
            "k_proj": (32, HIDDEN),
            "v_proj": (32, HIDDEN),
            "o_proj": (HIDDEN, 64),
            "q_norm": (16,),
            "k_norm": (16,),
        },
        Layers(head_dim=16, rotated=8),
        Mixture(EXPERTS, 3, scale=2.5),
        has_shared=True,
    ),
}
RUNS = [
    pytest.param(name, size, kernels, marks=() if is_quick else pytest.mark.slow)
    for name in KINDS
    for kernels in (KERNELS if name != "deepseek-v3.2" else ["torch"])
    for size in (1, 2)
    for is_quick in (
        (name == "deepseek-v3" and (size, kernels) in ((1, "torch"), (2, KERNELS[-1])))
        or (name == "deepseek-v3.2" and size == 1),
    )
]


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    """A function to the directory of a kind's target."""
    made = {}

    def save(kind):
        if kind.model not in made:
            made[kind.model] = tmp_path_factory.mktemp(kind.model)
            config = getattr(transformers, f"{kind.model}Config")(**kind.config)
            model_class = getattr(transformers, f"{kind.model}ForCausalLM")
            random_model(model_class, config, seed=4).save_pretrained(made[kind.model])
        return made[kind.model]

    return save


def checkpoint(kind, target_dir, directory):
    """Write the target with a random MTP layer; return its directory and the layer's weights."""
    made = weights(kind.shapes())
    directory = with_mtp(target_dir, directory, {PREFIX + each: t for each, t in made.items()})
    return directory, made


def expected_logits(kind, made, parts):
    def final(x):
        return rms(x, made["shared_head.norm.weight"], 1e-6)

    def run(tokens, features):
        embedded = rms(made["embed_tokens.weight"][tokens], made["enorm.weight"], 1e-6)
        features = rms(features, made["hnorm.weight"], 1e-6)
        x = torch.cat([embedded, features], dim=1) @ made["eh_proj.weight"].T
        return kind.layer(x, made)

    head = made["shared_head.head.weight"]
    return torch.stack(
        [drafted(part, part.hidden, run, lambda x: final(x) @ head.T, final, 5) for part in parts]
    )


@pytest.mark.parametrize(("name", "size", "kernels"), RUNS)
def test_logits_equal_the_equations(tmp_path, target_of, name, size, kernels):
    kind, parts = KINDS[name], sequences()
    target_dir = target_of(kind)
    directory, made = checkpoint(kind, target_dir, tmp_path / "a")
    found = head_logits(directory, target_dir, parts, size=size, kernels=kernels, borders=(5, 12))
    torch.testing.assert_close(found, expected_logits(kind, made, parts), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [pytest.param("deepseek-v3", marks=pytest.mark.slow), "qwen3-moe"])
def test_whole_experts_on_each_rank(tmp_path, target_of, name):
    kind, parts = KINDS[name], sequences()
    target_dir = target_of(kind)
    directory, made = checkpoint(kind, target_dir, tmp_path / "a")
    target = ModelConfig.from_directory(target_dir).divided_by_expert()
    config = HeadConfig.from_directory(directory, target)
    assert config.shape.decoder.experts.is_divided_by_expert
    found = draft_logits(config, target_dir, parts, size=2, kernels=KERNELS[-1])
    torch.testing.assert_close(found, expected_logits(kind, made, parts), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler")
def test_a_native_draft_is_one_call_with_the_tokens_of_steps(tmp_path, target_of):
    target_dir = target_of(V3)
    directory, made = checkpoint(V3, target_dir, tmp_path / "a")
    head = make_head(directory, target_dir)
    assert isinstance(head, NativeHead)
    assert head.capabilities.drafts_whole
    parts = sequences()
    drafts = WholeDrafts(head, parts).draft(0.0)
    for part, draft in zip(parts, drafts, strict=True):
        logits = expected_logits(V3, made, [replace(part, drafts=[*draft, 0, 0, 0, 0])])[0]
        best = logits[: len(draft)].topk(2).values
        assert (best[:, 0] - best[:, 1] > 1e-4).all(), "a tie, which either token may win"
        assert draft == logits[: len(draft)].argmax(1).tolist()


def test_the_config_reports_the_layer(tmp_path, target_of):
    target_dir = target_of(V3)
    directory, made = checkpoint(V3, target_dir, tmp_path / "a")
    target = ModelConfig.from_directory(directory)
    assert target == ModelConfig.from_directory(target_dir)
    head = HeadConfig.from_directory(directory, target)
    assert (head.method, head.num_kv_layers) == ("mtp", 1)
    assert head.kv_bytes_per_token("float32") == 4 * (14 + 6)  # one latent and rotated part
    assert head.weight_bytes("float32") == 4 * sum(each.numel() for each in made.values())


def test_a_layer_in_8_bit_floats_is_dequantized(tmp_path, target_of):
    """The layout of DeepSeek-V3: blocks with a scale each; projections of pairs and routers not."""
    target_dir = target_of(V3)
    directory, made = checkpoint(V3, target_dir, tmp_path / "a")
    packed_dir, tensors = tmp_path / "b", {}
    for name, tensor in made.items():
        tensors[PREFIX + name] = tensor
        if name.endswith("_proj.weight") and name != "eh_proj.weight":
            packed, made[name] = float8(tensor, per="block", block=16)
            prefix = PREFIX + name.removesuffix("weight")
            tensors |= {prefix + suffix: stored for suffix, stored in packed.items()}
    shutil.copytree(directory, packed_dir)
    own = load_file(directory / "model.safetensors")
    save_file(own | tensors, packed_dir / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    path = packed_dir / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )
    parts = sequences()
    found = head_logits(packed_dir, target_dir, parts, kernels=KERNELS[-1])
    torch.testing.assert_close(found, expected_logits(V3, made, parts), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("owner", "changes", "message"),
    [
        ("qwen3-moe", {}, "must both have latent attention, or neither"),
        ("deepseek-v3", {"first_k_dense_replace": 9}, "has experts, and the target has none"),
        (
            "deepseek-v3",
            {"n_routed_experts": 9},
            r"correction_bias has shape \[6\]; expected \[9\]",
        ),
    ],
)
def test_a_layer_that_is_not_like_the_target(tmp_path, target_of, owner, changes, message):
    directory, _ = checkpoint(V3, target_of(V3), tmp_path / "a")
    raw = json.loads((target_of(KINDS[owner]) / "config.json").read_text())
    target = ModelConfig.from_dict(raw | changes, {})
    with pytest.raises(UnsupportedModelError, match=message):
        HeadConfig.from_directory(directory, target)


def test_a_target_whose_layers_are_not_those_of_deepseek(tmp_path, target_of):
    directory, _ = checkpoint(V3, target_of(V3), tmp_path / "a")
    target = ModelConfig.from_directory(target_of(V3))
    other = replace(target, traits=replace(target.traits, residual_scale=0.5))
    with pytest.raises(UnsupportedModelError, match="not supported for DeepseekV3ForCausalLM"):
        HeadConfig.from_directory(directory, other)
