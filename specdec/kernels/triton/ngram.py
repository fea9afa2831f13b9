"""Prompt lookup on a GPU: two launches for all sequences of a step."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.reference.ngram import NgramLengths, Texts
from specdec.kernels.triton.device import ngram as kernels

BLOCK = 1024
"""Places of a text that a program compares at once."""

MAX_PARTS = 32
"""Programs that share a text."""

_MOST_SCORE = 2**31


def lookup(texts: Texts, num_wanted: Tensor, ngrams: NgramLengths, num_tokens: int) -> Tensor:
    """Return what `reference.ngram.lookup` returns."""
    token_ids, size = texts.token_ids, texts.token_ids.shape[1]
    assert token_ids.dtype == torch.int32
    assert token_ids.is_contiguous()
    assert (ngrams.longest + 1) * size < _MOST_SCORE, "scores of places have 32 bits"
    num_sequences, num_parts = len(texts.places), min(MAX_PARTS, triton.cdiv(size, BLOCK))
    scores = torch.empty(num_sequences, num_parts, dtype=torch.int32, device=token_ids.device)
    places, lengths = texts.places.contiguous(), texts.lengths.contiguous()
    wanted = num_wanted.contiguous()
    kernels.find_matches[(num_sequences, num_parts)](
        token_ids,
        places,
        lengths,
        wanted,
        scores,
        size,
        SHORTEST=ngrams.shortest,
        LONGEST=ngrams.longest,
        BLOCK=BLOCK,
        num_warps=4,
    )
    drafts = wanted.new_empty(num_sequences, 1 + num_tokens)
    kernels.copy_continuations[(num_sequences,)](
        token_ids,
        places,
        lengths,
        wanted,
        scores,
        drafts,
        size,
        num_parts,
        num_tokens,
        BLOCK_PARTS=MAX_PARTS,
        BLOCK=max(2, triton.next_power_of_2(num_tokens)),
        num_warps=1,
    )
    return drafts
