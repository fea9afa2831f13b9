"""Forbids tokens, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_masks(
    logits: Tensor,  # [num_rows, num_tokens], of the tokens from first_token on; changed
    rows: Tensor,  # [num_masked] int64
    masks: Tensor,  # [num_masked, num_words] int32
    first_token: int,
) -> None:
    """Makes -inf of the logits in `rows` whose bits are not set.

    Bit t % 32 of word t // 32 is for token t. Columns beyond the masks are left alone.
    """
    start = first_token // 8  # little-endian words, so bytes are in the tokens' order
    end = -(-(first_token + logits.shape[1]) // 8)
    octets = masks.view(torch.uint8)[:, start:end]
    bits = octets.unsqueeze(2).bitwise_right_shift(torch.arange(8, device=octets.device))
    allowed = (bits & 1).flatten(1)[:, first_token % 8 :].bool()
    columns = logits[:, : allowed.shape[1]]
    columns[rows] = columns[rows].masked_fill(~allowed[:, : columns.shape[1]], -torch.inf)
