"""Selection of the rows of output heads by tokens (`specdec.models.drafters.token_map`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.models.heads.formats.shape import HeadShape
from specdec.models.heads.tensors import HeadTensors
from specdec.types.errors import UnsupportedModelError


def select_tokens(
    shape: HeadShape, tensors: HeadTensors, wanted: Sequence[int]
) -> tuple[HeadShape, HeadTensors]:
    """Return a head that drafts only those of its tokens that are in `wanted`.

    wanted: the target's token ids. Raises UnsupportedModelError if the head has none of them.
    """
    heads = shape.output_heads
    assert heads is not None, "rows of this head cannot be selected"
    ids = torch.arange(shape.draft_vocab_size)
    if heads.has_ids:
        stored = tensors.slice(heads.ids).to(torch.int64)
        ids = ids + stored if heads.are_offsets else stored
    places = _places(ids, wanted)
    selected = ids[places]
    values = selected - torch.arange(len(places)) if heads.are_offsets else selected
    rows = selected if heads.is_whole else places
    found = replace(tensors.with_rows(heads.names, rows), values={heads.ids: values})
    return heads.with_tokens(len(places)), found


def _places(ids: Tensor, wanted: Sequence[int]) -> Tensor:
    """Return the ascending indices of the draft tokens `ids` that are wanted, [R] int64."""
    places = torch.isin(ids, torch.tensor(wanted)).nonzero().flatten()
    if not len(places):
        raise UnsupportedModelError(
            "speculative_token_map has none of the tokens that the head can draft"
        )
    return places
