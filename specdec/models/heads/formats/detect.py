"""Detection of the format of a head, by the keys of its config.json and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from specdec.models.config.model_config import ModelConfig
from specdec.models.config.registry import SAME_DECODERS, SUPPORTED_ARCHITECTURES
from specdec.models.heads.formats import speculators
from specdec.models.heads.formats.dflash import (
    is_block_drafter,
    predicts_from_anchor,
    read_dflash,
)
from specdec.models.heads.formats.eagle import read_eagle
from specdec.models.heads.formats.eagle3 import read_eagle3
from specdec.models.heads.formats.hydra import read_hydra
from specdec.models.heads.formats.medusa import has_medusa, read_medusa
from specdec.models.heads.formats.mlp_speculator import read_mlp_speculator
from specdec.models.heads.formats.mtp import has_mtp, read_mtp
from specdec.models.heads.formats.shape import HEAD_METHODS, HeadMethod, Reading
from specdec.models.heads.formats.source import Fields, HeadSource
from specdec.types.errors import UnsupportedModelError

Reader = Callable[[HeadSource, ModelConfig], Reading]
DetectedMethod = HeadMethod | Literal["draft_model", "pard"]
"""Method of a checkpoint; pard is a draft model that drafts in parallel."""

_OF_SPECULATORS: Mapping[str, Reader] = MappingProxyType(
    {
        "eagle3": read_eagle3,
        "peagle": read_eagle3,
        "dflash": read_dflash,
        "dspark": read_dflash,
    }
)
"""Readers by `speculators_model_type`."""

_METHODS: Mapping[Reader, HeadMethod] = MappingProxyType(
    {
        read_mtp: "mtp",
        read_mlp_speculator: "mlp_speculator",
        read_hydra: "hydra",
        read_medusa: "medusa",
        read_eagle: "eagle",
    }
)
"""Methods of the readers that have one only."""

_LOOKED_AT = (
    "speculators_model_type, model_type, architectures, medusa_num_heads, hydra_num_heads, "
    "pard_token, dflash_config, markov_rank, and the tensors fc.weight, midlayer.*, d2t, "
    "mask_hidden and mtp"
)


def read_head(source: HeadSource, target: ModelConfig) -> Reading:
    """Read a head with the reader of its format.

    Raises UnsupportedModelError for a format that is not known, or for its content.
    """
    return _reader_of(source)(source, target)


def detect_method(source: HeadSource) -> DetectedMethod:
    """Return the method that a checkpoint is for, by its keys and tensors, without a target.

    Raises UnsupportedModelError where they leave it open, with what was looked at and the methods
    to choose from.
    """
    if (method := head_method(source)) is not None:
        if method == "mtp" and _is_causal_lm(source.fields):
            raise UnsupportedModelError(
                f"{source.directory} is a whole model ({_architecture(source.fields)}) with layers "
                "for multi-token prediction: set method to draft_model, or to mtp if it is the "
                "target itself"
            )
        return method
    if _is_pard(source):
        return "pard"
    if _is_causal_lm(source.fields):
        return "draft_model"
    raise UnsupportedModelError(
        f"the method that {source.directory} is for cannot be detected from {_LOOKED_AT} "
        f"({_described(source)}): set method to draft_model or one of {', '.join(HEAD_METHODS)}"
    )


def head_method(source: HeadSource) -> HeadMethod | None:
    """Return the method of a head; None for other files.

    A whole model with MTP layers counts as a head. Raises UnsupportedModelError for an unknown
    kind of speculators files.
    """
    reader = _find_reader(source)
    if reader is read_eagle3:
        return "p_eagle" if "mask_hidden" in _names(source) else "eagle3"
    if reader is read_dflash:
        return "dspark" if predicts_from_anchor(source.fields) else "dflash"
    return None if reader is None else _METHODS[reader]


def _reader_of(source: HeadSource) -> Reader:
    if (reader := _find_reader(source)) is not None:
        return reader
    if _is_pard(source):
        raise UnsupportedModelError(
            f"{source.directory} is a PARD draft model (pard_token); use method pard for it"
        )
    raise UnsupportedModelError(
        f"{source.directory} is not a draft head of a known format ({_described(source)})"
    )


def _find_reader(source: HeadSource) -> Reader | None:
    """Return the reader of a head's format; None if it is none, or a PARD draft model."""
    fields = source.fields
    if speculators.is_speculators(fields):
        return _reader_of_speculators(fields)
    if has_mtp(source):
        return read_mtp
    model_type = fields.raw.get("model_type")
    if model_type == "mlp_speculator":
        return read_mlp_speculator
    if "hydra_num_heads" in fields:
        return read_hydra
    if has_medusa(source):
        return read_medusa
    if _is_pard(source):
        return None
    if is_block_drafter(source):
        return read_dflash
    if _is_eagle3(source):
        return read_eagle3
    if _names(source) >= {"fc.weight", "layers.0.self_attn.q_proj.weight"}:
        return read_eagle
    return None


def _reader_of_speculators(fields: Fields) -> Reader:
    name = fields.text("speculators_model_type")
    if name not in _OF_SPECULATORS:
        raise fields.error("speculators_model_type", f"one of {', '.join(_OF_SPECULATORS)}")
    return _OF_SPECULATORS[name]


def _is_eagle3(source: HeadSource) -> bool:
    names = _names(source)
    by_tensors = bool({"d2t", "mask_hidden", "layers.0.hidden_norm.weight"} & names)
    return (
        "Eagle3" in _architecture(source.fields)
        or by_tensors
        or any(name.startswith("midlayer.") for name in names)
    )


def _is_pard(source: HeadSource) -> bool:
    return "pard_token" in source.fields and "mask_hidden" not in source.shapes


def _is_causal_lm(fields: Fields) -> bool:
    """Return whether config.json is that of a whole model, which may not be supported here."""
    name = _architecture(fields)
    is_known = name in (*SUPPORTED_ARCHITECTURES, *SAME_DECODERS)
    return is_known or name.endswith(("ForCausalLM", "LMHeadModel"))


def _described(source: HeadSource) -> str:
    model_type = source.fields.raw.get("model_type")
    return (
        f"architecture {_architecture(source.fields)}, model_type {model_type}, "
        f"{len(source.shapes)} tensors"
    )


def _names(source: HeadSource) -> set[str]:
    return {name.removeprefix("model.") for name in source.shapes}


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "none"
