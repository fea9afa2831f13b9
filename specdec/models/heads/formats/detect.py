"""Detection of the format of a head, by the keys of its config.json and its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import NamedTuple

from specdec.config.speculation.head_methods import ColocatedDraftModelConfig
from specdec.config.speculation.methods import DraftModelConfig, head_methods
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.registry import SAME_DECODERS, SUPPORTED_ARCHITECTURES
from specdec.models.heads.formats import speculators
from specdec.models.heads.formats.shape import HeadFormat, Reading
from specdec.models.heads.formats.source import Fields, HeadSource
from specdec.models.heads.formats.whole_model import WHOLE_MODEL
from specdec.types.errors import UnsupportedModelError

PARD = "pard"
"""The method that is detected for a draft model that drafts in parallel."""


class DetectedHead(NamedTuple):
    """The method of a head's checkpoint, and the format of its files."""

    method: str
    format: HeadFormat


def read_head(
    source: HeadSource, target: ModelConfig, method: str | None = None
) -> tuple[str, Reading]:
    """Return the method of a head, and what the reader of its format finds.

    method: that is configured. The files decide, except of a draft model, which may have anything.
    Raises UnsupportedModelError for a format that is not known, or for its content.
    """
    if method == ColocatedDraftModelConfig.name:
        return method, WHOLE_MODEL.read(source, target)
    if (found := _find_head(source)) is not None:
        return found.method, found.format.read(source, target)
    if source.is_pard:
        raise UnsupportedModelError(
            f"{source.directory} is a PARD draft model (pard_token); use method pard for it"
        )
    raise UnsupportedModelError(
        f"{source.directory} is not a draft head of a known format ({_described(source)})"
    )


def detect_method(source: HeadSource) -> str:
    """Return the method that a checkpoint is for, by its keys and tensors, without a target.

    That of a head, draft_model, or `PARD`. Raises UnsupportedModelError where the files leave it
    open, with what was looked at and the methods to choose from.
    """
    if (method := head_method(source)) is not None:
        if source.architecture.endswith("NextN"):
            raise UnsupportedModelError(
                f"{source.directory} has layers for multi-token prediction alone "
                f"({source.architecture}): they are read from the target's own files; set method "
                f"to {method} without a model"
            )
        if is_in_whole_model(source, method):
            raise UnsupportedModelError(
                f"{source.directory} is a whole model ({source.architecture}) with layers for "
                f"multi-token prediction: set method to draft_model, or to {method} if it is the "
                "target itself"
            )
        return method
    if source.is_pard:
        return PARD
    if _is_causal_lm(source):
        return DraftModelConfig.name
    raise UnsupportedModelError(
        f"the method that {source.directory} is for cannot be detected from {_looked_at()} "
        f"({_described(source)}): set method to draft_model or one of {', '.join(head_methods())}"
    )


def head_method(source: HeadSource) -> str | None:
    """Return the method of a head; None for other files.

    A whole model with MTP layers counts as a head. Raises UnsupportedModelError for an unknown
    kind of speculators files.
    """
    found = _find_head(source)
    return None if found is None else found.method


def is_in_whole_model(source: HeadSource, method: str) -> bool:
    """Return whether the layers of a head are beside those of a whole model.

    Only files of speculators are supported with such layers alone.
    """
    return head_methods()[method].is_in_target and not speculators.is_speculators(source.fields)


def _formats() -> list[DetectedHead]:
    """Return the formats of all methods, in the order of the table of methods."""
    return [
        DetectedHead(name, resolve_name(method.head_format))
        for name, method in head_methods().items()
    ]


def _find_head(source: HeadSource) -> DetectedHead | None:
    """Return a head's method and format; None if it is none, or a PARD draft model."""
    formats = sorted(_formats(), key=lambda each: each.format.order)
    if speculators.is_speculators(source.fields):
        found = _of_speculators(source.fields, formats)
    else:
        found = (each for each in formats if each.format.recognizes(source))
    return next((each for each in found if each.format.is_variant(source)), None)


def _of_speculators(fields: Fields, formats: list[DetectedHead]) -> Iterator[DetectedHead]:
    """Return the heads whose formats have the kind of a speculators file."""
    kind = fields.text("speculators_model_type")
    known = dict.fromkeys(name for each in _formats() for name in each.format.speculators_types)
    if kind not in known:
        raise fields.error("speculators_model_type", f"one of {', '.join(known)}")
    return (each for each in formats if kind in each.format.speculators_types)


def _looked_at() -> str:
    """Return the keys and tensors by which formats are detected."""
    formats = [each.format for each in _formats()]
    keys = dict.fromkeys(key for each in formats for key in each.keys)
    *first, last = dict.fromkeys(name for each in formats for name in each.tensors)
    return (
        f"speculators_model_type, model_type, architectures, {', '.join(keys)}, and the tensors "
        f"{', '.join(first)} and {last}"
    )


def _is_causal_lm(source: HeadSource) -> bool:
    """Return whether config.json is that of a whole model, which may not be supported here."""
    name = source.architecture
    is_known = name in (*SUPPORTED_ARCHITECTURES, *SAME_DECODERS)
    return is_known or name.endswith(("ForCausalLM", "LMHeadModel"))


def _described(source: HeadSource) -> str:
    model_type = source.fields.raw.get("model_type")
    return (
        f"architecture {source.architecture}, model_type {model_type}, {len(source.shapes)} tensors"
    )
