"""The best token of each row of logits over all ranks."""

from __future__ import annotations

import torch

from specdec.distributed.group import TensorParallelGroup
from specdec.kernels.cpu import SharedMemory
from specdec.kernels.sample import Peaks, peaks_of_ranks


def whole_peaks(peaks: Peaks, group: TensorParallelGroup, first_token: int) -> Peaks:
    """Of the whole vocabulary, the same on every rank; a collective call.

    peaks: of this rank's logits, which are those of the tokens from first_token on. A row is broken
    where a part of it is.
    """
    if group.size == 1:
        return peaks
    if isinstance(group.collectives, SharedMemory):
        return peaks_of_ranks(peaks, group.collectives, first_token)
    columns = (peaks.values, first_token + peaks.token_ids, peaks.is_broken)
    own = torch.stack([column.double() for column in columns], dim=1)  # which holds each exactly
    values, token_ids, is_broken = group.all_gather(own).unbind(2)  # [size, num_rows] each
    # The first of equal ranks holds the lowest token ids.
    best = values.argmax(0, keepdim=True)
    return Peaks(
        values.gather(0, best).squeeze(0).float(),
        token_ids.gather(0, best).squeeze(0).long(),
        is_broken.any(0),
    )
