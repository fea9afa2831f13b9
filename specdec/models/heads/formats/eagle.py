"""EAGLE-1 and EAGLE-2 (Li et al. 2024): a decoder layer on embedding and feature.

Layout of SafeAILab, whose first layer has no norm before attention; the output head is the
target's, without a norm before it. ModelOpt's switches for norms follow from the tensors.
"""

from __future__ import annotations

import re

from specdec.models.config import ModelConfig
from specdec.models.heads.formats.fused import FusedShape
from specdec.models.heads.formats.layers import read_layers, theta_note
from specdec.models.heads.formats.shape import Reading
from specdec.models.heads.formats.source import HeadSource

_NORMS = {"enorm.weight": "token_norm.weight", "hnorm.weight": "feature_norm.weight"}
_BUFFERS = re.compile(r".*rotary_emb\.inv_freq|t2d|d2t")


def read_eagle(source: HeadSource, target: ModelConfig) -> Reading:
    """Read an EAGLE-1 or EAGLE-2 head."""
    fields = source.fields
    fields.require_equal("hidden_size", target.hidden_size, "the target")
    fields.require_equal("vocab_size", target.vocab_size, "the target")
    names = source.renamed(_canonical)
    shape = FusedShape(
        decoder=read_layers(fields, names, target),
        draft_vocab_size=target.vocab_size,
        has_bias="fc.bias" in names,
        normalizes_inputs="token_norm.weight" in names,
        has_first_norm="layers.0.input_layernorm.weight" in names,
        has_final_norm="norm.weight" in names and fields.flag("use_last_layernorm", default=True),
        has_embedding="embed_tokens.weight" in names,
        has_lm_head="lm_head.weight" in names,
    )
    return Reading(
        "eagle",
        "EAGLE",
        shape,
        names,
        notes=theta_note(fields, target),
        ignored=lambda name: bool(_BUFFERS.fullmatch(name)) or name == "norm.weight",
    )


def _canonical(stored: str) -> str:
    name = stored.removeprefix("model.")
    return _NORMS.get(name, name)
