"""Penalties and token masks of rows of logits on a GPU, in place."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.reference.logit_edits import LogitEdits
from specdec.kernels.triton.device import edits as kernels

_BLOCK = 2048


def edit_rows(logits: Tensor, edits: LogitEdits, paths: Tensor, first_token: int) -> None:
    """Apply penalties and masks of `edits.changes`, which is not empty.

    logits: [R, num_tokens] float32. paths: [C, num_drafts] int64, the drafts before each row,
    -1 for none. first_token: of the columns.
    """
    num_tokens = logits.shape[1]
    assert logits.stride(1) == 1
    assert edits.seen is None or edits.seen.stride() == (num_tokens, 1)
    kernels.edit_rows[(len(edits.changes), triton.cdiv(num_tokens, _BLOCK))](
        logits,
        edits.changes,
        edits.changes.view(torch.float64),
        edits.masks,
        edits.masks if edits.seen is None else edits.seen,  # not read
        paths.contiguous(),
        logits.stride(0),
        num_tokens,
        paths.shape[1],
        first_token,
        edits.masks.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
