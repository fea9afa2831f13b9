"""Texts to look n-grams up in, and what the engine's proposer drafts after them."""

from __future__ import annotations

import torch

from specdec.config.speculation.methods import NgramConfig
from specdec.kernels.reference.ngram import NgramLengths, Texts
from specdec.speculation.proposers.ngram import NgramProposer
from tests.specdec.speculation.proposers.sequences import drafts, sequence

NGRAMS = [NgramLengths(2, 4), NgramLengths(1, 1), NgramLengths(1, 3), NgramLengths(3, 16)]

MAX_LEN = 70
"""Length of the longest text, which is that of a whole row."""


def random_texts(num_symbols: int, seed: int, count: int = 12) -> tuple[Texts, list[list[int]]]:
    """Return texts of few different tokens, in places of any order, and their tokens."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(num_symbols, (count, MAX_LEN), generator=generator)
    lengths = torch.randint(1, MAX_LEN, (count,), generator=generator)
    lengths[:4] = torch.tensor([1, 2, 3, MAX_LEN])
    places = torch.randperm(count, generator=generator)
    tokens = [
        token_ids[p, :n].tolist() for p, n in zip(places.tolist(), lengths.tolist(), strict=True)
    ]
    return Texts(token_ids.int(), places, lengths), tokens


def proposed(text: list[int], ngrams: NgramLengths, count: int) -> list[int]:
    """Return the draft of `count` tokens that the engine's proposer makes after a text."""
    [draft] = drafts(NgramProposer(NgramConfig(*ngrams)), sequence(0, text), count=max(0, count))
    return list(draft)
