"""Selection of the rows of output heads by a list of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from specdec.models.heads.formats.dflash import DFlashShape
from specdec.models.heads.formats.eagle3 import Eagle3Shape
from specdec.models.heads.formats.medusa import MedusaShape
from specdec.models.heads.formats.shape import HeadShape
from specdec.models.heads.tensors import HeadTensors
from specdec.models.heads.token_map import output_head_names
from specdec.types.errors import UnsupportedModelError

_WithDraftIds = TypeVar("_WithDraftIds", Eagle3Shape, DFlashShape)


def select_tokens(
    shape: HeadShape, tensors: HeadTensors, wanted: Sequence[int]
) -> tuple[HeadShape, HeadTensors]:
    """Return a head that drafts only those of its tokens that are in `wanted`.

    wanted: the target's token ids. Raises UnsupportedModelError if the head has none of them.
    """
    match shape:
        case MedusaShape():
            return _of_medusa(shape, tensors, wanted)
        case Eagle3Shape():
            return _with_draft_ids(shape, tensors, wanted)
        case DFlashShape():
            return _with_draft_ids(shape, tensors, wanted)
    raise AssertionError("rows of this head cannot be selected")


def _of_medusa(
    shape: MedusaShape, tensors: HeadTensors, wanted: Sequence[int]
) -> tuple[MedusaShape, HeadTensors]:
    ids = torch.arange(shape.draft_vocab_size)
    if shape.has_token_map:
        ids = tensors.slice("token_map").to(torch.int64)
    places = _places(ids, wanted)
    is_stored_whole = shape.stored_vocab_size != shape.draft_vocab_size
    rows, count = ids[places] if is_stored_whole else places, len(places)
    selected = replace(shape, draft_vocab_size=count, stored_vocab_size=count, has_token_map=True)
    return selected, _selected(shape, tensors, rows, {"token_map": ids[places]})


def _with_draft_ids(
    shape: _WithDraftIds, tensors: HeadTensors, wanted: Sequence[int]
) -> tuple[_WithDraftIds, HeadTensors]:
    ids = torch.arange(shape.draft_vocab_size)
    if shape.has_draft_ids:
        ids = ids + tensors.slice("d2t").to(torch.int64)
    places = _places(ids, wanted)
    offsets = ids[places] - torch.arange(len(places))
    selected = replace(shape, draft_vocab_size=len(places), has_draft_ids=True)
    return selected, _selected(shape, tensors, places, {"d2t": offsets})


def _places(ids: Tensor, wanted: Sequence[int]) -> Tensor:
    """Return the ascending indices of the draft tokens `ids` that are wanted, [R] int64."""
    places = torch.isin(ids, torch.tensor(wanted)).nonzero().flatten()
    if not len(places):
        raise UnsupportedModelError(
            "speculative_token_map has none of the tokens that the head can draft"
        )
    return places


def _selected(
    shape: HeadShape, tensors: HeadTensors, rows: Tensor, values: dict[str, Tensor]
) -> HeadTensors:
    return replace(tensors, rows=dict.fromkeys(output_head_names(shape), rows), values=values)
