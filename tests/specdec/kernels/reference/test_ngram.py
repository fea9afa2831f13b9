# Modules: specdec.kernels.reference.ngram
"""Prompt lookup in fixed shapes drafts what the engine's proposer drafts."""

import pytest
import torch

from specdec.kernels.reference.ngram import lookup
from tests.specdec.lookups import NGRAMS, proposed, random_texts


@pytest.mark.parametrize("ngrams", NGRAMS)
@pytest.mark.parametrize("num_symbols", [1, 2, 3, 8, 300])
def test_drafts_are_those_of_the_proposer(ngrams, num_symbols):
    """The texts are random, repetitive and short; a lookup begins anywhere in them."""
    found = []
    for num_tokens in (1, 3, 8, 33):
        texts, tokens = random_texts(num_symbols, seed=num_tokens)
        wanted = torch.arange(len(tokens)) % (num_tokens + 2) - 1  # negative ones too
        drafts = lookup(texts, wanted, ngrams, num_tokens)
        assert drafts.shape == (len(tokens), 1 + num_tokens)
        for row, text, count in zip(drafts.tolist(), tokens, wanted.tolist(), strict=True):
            expected = proposed(text, ngrams, count)
            assert row == [len(expected), *expected, *[0] * (num_tokens - len(expected))]
            found.append(len(expected))
    assert any(found) or num_symbols == 300


def test_tokens_after_a_text_are_not_read():
    """A rejected draft stays where it was written, until another token takes its place."""
    texts, _ = random_texts(2, seed=0)
    drafts = lookup(texts, torch.full((len(texts.lengths),), 4), NGRAMS[0], 4)
    is_after = torch.arange(texts.token_ids.shape[1]) >= texts.lengths[texts.places.argsort(), None]
    texts.token_ids.masked_fill_(is_after, 7)
    assert torch.equal(lookup(texts, torch.full((len(texts.lengths),), 4), NGRAMS[0], 4), drafts)
