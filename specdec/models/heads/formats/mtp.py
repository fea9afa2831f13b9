"""Multi-token prediction layers (DeepSeek-V3, section 2.2), mostly in a target's own checkpoint.

The families differ in names, in the order of the projection's inputs and in the last norm. Only the
first of several MTP layers is used, for all draft tokens. A layer with latent attention or with a
mixture of experts is like the target's own layers, from which it has all sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from specdec.models.config.attention.latent import INDEXER
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.traits import LLAMA
from specdec.models.heads.formats import speculators
from specdec.models.heads.formats.fused import FusedShape
from specdec.models.heads.formats.layers import layer_of_target, read_layers
from specdec.models.heads.formats.shape import HeadFormat, Reading
from specdec.models.heads.formats.source import HeadSource, TensorNames
from specdec.types.errors import UnsupportedModelError


@dataclass(frozen=True)
class _Family:
    """One layout.

    pattern: beginning of the names of its tensors, with the MTP layer's `index`. replacement: of
    what matches, as in `re.sub`. renames: beginnings of the names that this gives, and ours; other
    tensors are those of the decoder layer. adds_one: norms are stored as their difference from 1.
    """

    name: str
    pattern: re.Pattern[str]
    renames: Mapping[str, str]
    replacement: str = ""
    is_feature_first: bool = False
    adds_one: bool = False

    def index(self, stored: str) -> int | None:
        """Return the index of a tensor's MTP layer; None for a tensor of another layer."""
        match = self.pattern.match(stored)
        return None if match is None else int(match["index"] or 0)

    def canonical(self, stored: str) -> str:
        """Return our name of a tensor that matches the pattern."""
        name = self.pattern.sub(self.replacement, stored, count=1)
        for start, ours in self.renames.items():
            if name.startswith(start):
                return ours + name.removeprefix(start)
        return f"layers.0.{name}"


_MIMO = _Family(
    "MiMo",
    re.compile(r"model\.mtp_layers\.(?P<index>\d+)\."),
    {
        "token_layernorm": "token_norm",
        "hidden_layernorm": "feature_norm",
        "input_proj": "fc",
        "final_layernorm": "norm",
    },
    is_feature_first=True,
)
_SPECULATORS = replace(
    _MIMO,
    name="speculators",
    pattern=re.compile(r"mtp_layers\.(?P<index>\d+)\."),
    is_feature_first=False,
)
_QWEN3_NEXT = _Family(
    "Qwen3-Next",
    re.compile(r"(?:model\.)?mtp\.(?P<index>)"),
    {
        "pre_fc_norm_embedding": "token_norm",
        "pre_fc_norm_hidden": "feature_norm",
        "fc": "fc",
        "norm": "norm",
        "layers.": "layers.",
        "embed_tokens": "embed_tokens",
    },
    adds_one=True,
)
_ERNIE = _Family(
    "ERNIE-4.5",
    re.compile(r"model\.mtp_(?P<part>emb_norm|hidden_norm|linear_proj|block)\.(?P<index>\d+)\."),
    {
        "emb_norm": "token_norm",
        "hidden_norm": "feature_norm",
        "linear_proj": "fc",
        "block": "layers.0",
    },
    replacement=r"\g<part>.",
)
_DEEPSEEK_NAMES = {
    "enorm": "token_norm",
    "hnorm": "feature_norm",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}


def _has_mtp(source: HeadSource) -> bool:
    """Return whether a checkpoint has MTP layers beside those of a model."""
    return any(
        name.endswith(".eh_proj.weight")
        or any(each.pattern.match(name) for each in (_MIMO, _QWEN3_NEXT, _ERNIE))
        for name in source.shapes
    )


def read_mtp(source: HeadSource, target: ModelConfig) -> Reading:
    """Read MTP layers, in the layout that the tensors show.

    They are in the target's checkpoint, or alone in a file of speculators.
    """
    if target.traits.has_one_block:
        raise UnsupportedModelError(
            f"{source.directory}: the MTP layers of {target.architecture} are blocks of attention "
            "and experts with a norm each, which no draft head has"
        )
    family = _family_of(source, target)
    indices = {index for name in source.shapes if (index := family.index(name)) is not None}
    kept = source.restricted(lambda name: family.index(name) == min(indices))
    names = kept.renamed(family.canonical)
    has_final_norm = "norm.weight" in names
    shape = FusedShape(
        decoder=_read_layer(source, names, target, family),
        draft_vocab_size=target.vocab_size,
        has_bias="fc.bias" in names,
        normalizes_inputs=True,
        is_feature_first=family.is_feature_first,
        has_final_norm=has_final_norm,
        recycles_norm=has_final_norm,
        adds_one=family.adds_one or (family is _SPECULATORS and target.traits.adds_one_to_norms),
        has_embedding="embed_tokens.weight" in names,
        has_lm_head="lm_head.weight" in names,
    )
    notes = (f"the first of {len(indices)} MTP layers is used",) if len(indices) > 1 else ()
    fields, name = source.fields, f"MTP ({family.name})"
    return Reading(
        speculators.described(fields, "MTP") if family is _SPECULATORS else name,
        shape,
        names,
        speculators.target_name(fields),
        speculators.num_draft_tokens(fields),
        notes=notes,
        ignored=lambda name: name.endswith("rotary_emb.inv_freq") or f".{INDEXER}." in name,
    )


def _read_layer(
    source: HeadSource, names: TensorNames, target: ModelConfig, family: _Family
) -> ModelConfig:
    """Read the decoder layer, whose kind the tensors show.

    Raises UnsupportedModelError for a layer with experts or latents that is not like the target's.
    """
    has_latents = "layers.0.self_attn.kv_a_proj_with_mqa.weight" in names
    has_experts = "layers.0.mlp.gate.weight" in names
    if not has_experts and "layers.0.mlp.gate_proj.weight" not in names:
        raise UnsupportedModelError(
            f"{source.directory}: the MLP of the MTP layer is of an unknown kind; it must have "
            "mlp.gate_proj, or mlp.gate and experts"
        )
    is_gated = target.traits.has_attention_gate and family in (_QWEN3_NEXT, _SPECULATORS)
    if not has_latents and not has_experts and not is_gated:
        fields = speculators.layer_fields(source.fields)
        return read_layers(fields, names, target, num_layers=1)
    if has_latents != (target.latent is not None):
        raise UnsupportedModelError(
            f"{source.directory}: the MTP layer and the target must both have latent attention, or "
            "neither"
        )
    if has_experts and not (target.experts and target.experts.layers):
        raise UnsupportedModelError(
            f"{source.directory}: the MTP layer has experts, and the target has none"
        )
    if is_gated:
        # Norms have their values once they are read; see `adds_one`.
        traits = replace(target.traits, adds_one_to_norms=False)
        target = replace(target, traits=traits)
    elif replace(target.traits, attention_scale=None) != LLAMA:
        raise UnsupportedModelError(
            f"{source.directory}: MTP layers with experts or latent attention are not supported "
            f"for {target.architecture}, whose layers differ from those of DeepSeek"
        )
    return layer_of_target(target, has_experts=has_experts)


def _family_of(source: HeadSource, target: ModelConfig) -> _Family:
    for family in (_MIMO, _SPECULATORS, _QWEN3_NEXT, _ERNIE):
        if any(family.pattern.match(name) for name in source.shapes):
            return family
    # After the layers of the model itself.
    numbers = "|".join(str(target.num_layers + index) for index in range(16))
    pattern = re.compile(rf"model\.layers\.(?P<index>{numbers})\.")
    if not any(pattern.match(name) for name in source.shapes):
        raise UnsupportedModelError(
            f"{source.directory} has no MTP layer after the {target.num_layers} layers of the "
            "target"
        )
    return _Family("DeepSeek", pattern, _DEEPSEEK_NAMES)


MTP = HeadFormat(read_mtp, _has_mtp, speculators_types=("mtp",), tensors=("mtp",), order=1)
