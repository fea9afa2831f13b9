"""Prompt lookup in fixed shapes: the drafts of `proposers.ngram`, on a device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class NgramLengths(NamedTuple):
    """Fewest and most tokens of the n-grams to look up."""

    shortest: int
    longest: int


class Texts(NamedTuple):
    """The texts of B sequences; tokens after a length have no meaning.

    token_ids: one text for each place. places, lengths: of each sequence; a length is from 1 to
    max_len.
    """

    token_ids: Tensor  # [num_places, max_len] int32
    places: Tensor  # [B] int64
    lengths: Tensor  # [B] int64


def lookup(texts: Texts, num_wanted: Tensor, ngrams: NgramLengths, num_tokens: int) -> Tensor:
    """Return drafts, without a value that the host has to read.

    A draft is what followed the last earlier occurrence of the text's longest final n-gram that
    has one; past the end of the text it repeats, as in LZ77 (Saxena 2023).

    num_wanted: tokens of each draft, [B] int64, at most num_tokens. Returns
    [B, 1 + num_tokens] int64: the number of tokens of each draft, 0 without an occurrence, then the
    tokens, and zeros.
    """
    text, size = texts.token_ids[texts.places], texts.token_ids.shape[1]
    last = texts.lengths[:, None] - 1
    index = torch.arange(size, device=text.device)
    matches = torch.zeros_like(text)  # tokens up to each place that end the text too
    goes_on = (index < last).expand(matches.shape)
    for count in range(ngrams.longest):
        token = text.gather(1, (last - count).clamp_min(0))
        goes_on = goes_on & pad(text[:, : size - count] == token, (count, 0))
        matches += goes_on
    scores = torch.where(matches < ngrams.shortest, -1, matches * size + index)
    best = scores.amax(1, keepdim=True)
    start = best.clamp_min(0) % size + 1
    offsets = torch.arange(num_tokens, device=text.device)
    places = start + offsets % (last + 1 - start).clamp_min(1)
    counts = torch.where(best >= 0, num_wanted.clamp_min(0)[:, None], 0)
    tokens = text.gather(1, places.clamp_max(size - 1)).masked_fill(offsets >= counts, 0)
    return torch.cat([counts, tokens], 1)
