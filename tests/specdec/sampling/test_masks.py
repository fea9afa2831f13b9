"""Masks of tokens against a loop over bits."""

import numpy as np
import pytest
import torch

from specdec.sampling.logits_processors import apply_token_masks


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 100, 383])
@pytest.mark.parametrize("first_token", [0, 8, 13, 128])
def test_bits_select_the_unmasked_logits(num_tokens, first_token):
    rng = np.random.default_rng(num_tokens + first_token)
    words = rng.integers(-(2**31), 2**31, (3, 17), dtype=np.int32)  # 544 tokens
    logits = torch.randn(5, num_tokens)
    expected = logits.clone()
    for row, mask in zip((3, 0, 4), words.tolist(), strict=True):
        for column in range(num_tokens):
            token = first_token + column
            if not (mask[token // 32] >> (token % 32)) & 1:
                expected[row, column] = -torch.inf
    apply_token_masks(logits, [3, 0, 4], list(words), first_token)
    assert torch.equal(logits, expected)


def test_tokens_beyond_the_masks_are_masked():
    logits = torch.zeros(1, 50)
    apply_token_masks(logits, [0], [np.array([-1], dtype=np.int32)], 10)
    assert (logits[0, :22] == 0).all()
    assert logits[0, 22:].isinf().all()
