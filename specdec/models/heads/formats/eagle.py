"""EAGLE-1 and EAGLE-2 (Li et al. 2024): a decoder layer on embedding and feature.

Layouts of SafeAILab, whose first layer has no norm before attention and whose output head, the
target's, has none before it; of ModelOpt, whose norms follow from the tensors; and of vLLM's older
releases, with the layer's sizes under `model`. HASS (Zhang et al. 2024) trains the same network; in
vLLM's layout its `add_para_norm` normalizes embedding and feature.
"""

from __future__ import annotations

import re

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.fused import FusedShape
from specdec.models.heads.formats.layers import layers_note, read_layers, theta_note
from specdec.models.heads.formats.shape import HeadFormat, Reading
from specdec.models.heads.formats.source import Fields, HeadSource, TensorNames

_NORMS = {"enorm.weight": "token_norm.weight", "hnorm.weight": "feature_norm.weight"}
_FIRST_NORM, _FINAL_NORM = "layers.0.input_layernorm.weight", "norm.weight"
_UNUSED = re.compile(rf".*rotary_emb\.inv_freq|t2d|d2t|{_FIRST_NORM}|{_FINAL_NORM}")


def read_eagle(source: HeadSource, target: ModelConfig) -> Reading:
    """Read an EAGLE-1 or EAGLE-2 head."""
    is_nested = isinstance(source.fields.raw.get("model"), dict)
    fields = source.fields.nested("model") if is_nested else source.fields
    fields.require_equal("hidden_size", target.hidden_size, "the target")
    fields.require_equal("vocab_size", target.vocab_size, "the target")
    names = source.renamed(_canonical)
    has_final_norm = _has_norm(fields, names, "skip_output_norm", _FINAL_NORM, is_nested)
    shape = FusedShape(
        decoder=read_layers(fields, names, target),
        draft_vocab_size=target.vocab_size,
        has_bias="fc.bias" in names,
        normalizes_inputs=fields.flag("add_para_norm", default="token_norm.weight" in names),
        has_first_norm=_has_norm(fields, names, "skip_prenorm", _FIRST_NORM, is_nested),
        has_final_norm=has_final_norm and fields.flag("use_last_layernorm", default=True),
        has_embedding="embed_tokens.weight" in names,
        has_lm_head="lm_head.weight" in names,
    )
    return Reading(
        "EAGLE",
        shape,
        names,
        notes=(*theta_note(fields, target), *layers_note(fields, shape.decoder)),
        ignored=lambda name: bool(_UNUSED.fullmatch(name)),
    )


def _has_norm(fields: Fields, names: TensorNames, key: str, name: str, is_nested: bool) -> bool:
    """Return whether norm `name` applies: by its key, else where the tensor is present.

    is_nested: in vLLM's layout, which stores the norm without use unless the key is false.
    """
    return not fields.flag(key, default=is_nested or name not in names)


def _canonical(stored: str) -> str:
    name = stored.removeprefix("model.")
    return _NORMS.get(name, name)


def _is_eagle(source: HeadSource) -> bool:
    layer = {"fc.weight", "layers.0.self_attn.q_proj.weight"}
    return not source.is_pard and source.short_names >= layer


EAGLE = HeadFormat(read_eagle, _is_eagle, keys=("pard_token",), tensors=("fc.weight",), order=7)
