"""Detection of the format of a head, by the keys of its config.json and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from specdec.models.config import ModelConfig
from specdec.models.heads.formats import speculators
from specdec.models.heads.formats.dflash import is_block_drafter, read_dflash
from specdec.models.heads.formats.eagle import read_eagle
from specdec.models.heads.formats.eagle3 import read_eagle3
from specdec.models.heads.formats.hydra import read_hydra
from specdec.models.heads.formats.medusa import has_medusa, read_medusa
from specdec.models.heads.formats.mlp_speculator import read_mlp_speculator
from specdec.models.heads.formats.mtp import has_mtp, read_mtp
from specdec.models.heads.formats.shape import Reading
from specdec.models.heads.formats.source import Fields, HeadSource
from specdec.types.errors import UnsupportedModelError

Reader = Callable[[HeadSource, ModelConfig], Reading]

_OF_SPECULATORS: Mapping[str, Reader] = MappingProxyType(
    {
        "eagle3": read_eagle3,
        "peagle": read_eagle3,
        "dflash": read_dflash,
        "dspark": read_dflash,
    }
)
"""Readers by `speculators_model_type`."""


def read_head(source: HeadSource, target: ModelConfig) -> Reading:
    """Read a head with the reader of its format.

    Raises UnsupportedModelError for a format that is not known, or for its content.
    """
    return _reader_of(source)(source, target)


def _reader_of(source: HeadSource) -> Reader:
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
    if "pard_token" in fields and "mask_hidden" not in source.shapes:
        raise UnsupportedModelError(
            f"{source.directory} is a PARD draft model (pard_token); use method pard for it"
        )
    if is_block_drafter(source):
        return read_dflash
    if _is_eagle3(source):
        return read_eagle3
    if _names(source) >= {"fc.weight", "layers.0.self_attn.q_proj.weight"}:
        return read_eagle
    raise UnsupportedModelError(
        f"{source.directory} is not a draft head of a known format (architecture "
        f"{_architecture(fields)}, model_type {model_type}, {len(source.shapes)} tensors)"
    )


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


def _names(source: HeadSource) -> set[str]:
    return {name.removeprefix("model.") for name in source.shapes}


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "none"
