"""Counts of the output tokens of sequences with penalties, on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.kernels.reference.logit_edits import PROMPT_TOKEN
from specdec.sampling.token_history import TokenHistory
from specdec.worker.device.input.buffers import copy_to_device


class SeenTokens:
    """How often each token is in the output of a sequence, and whether it is in its prompt.

    The steps on the device count their own tokens, so the host sends the counts of a sequence once,
    and again after a step that it has run itself.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        """num_places: of sequences; the memory is allocated with the first that has penalties."""
        self._num_places, self._device = num_places, device
        self.table: Tensor | None = None  # [num_places, tokens of this rank] int32
        self._held: set[int] = set()

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Send the counts of sequences again with their next step."""
        if self._held:
            self._held.difference_update(seq_ids)

    def hold(self, seq_id: int, place: int, history: TokenHistory, tokens: range) -> None:
        """Have the counts of a sequence on the device, before the next step; does not wait.

        history: its tokens, unless the device has the counts. tokens: whose logits this rank has.
        Raises torch.OutOfMemoryError.
        """
        if seq_id in self._held:
            return
        if self.table is None:
            size = (self._num_places, len(tokens))
            self.table = torch.zeros(size, dtype=torch.int32, device=self._device)
        found = history.counts()
        found.num_in_output[: found.num_of_prompt] += PROMPT_TOKEN
        is_held = (found.token_ids >= tokens.start) & (found.token_ids < tokens.stop)
        columns, counts = copy_to_device(
            [found.token_ids[is_held] - tokens.start, found.num_in_output[is_held]], self._device
        )
        own = self.table[place]
        own.zero_()
        own.index_copy_(0, columns, counts.int())
        self._held.add(seq_id)


def count_tokens(
    seen: Tensor,  # [num_places, V] int32
    places: Tensor,  # [P] int64
    token_ids: Tensor,  # [P, Q] int64
    counts: Tensor,  # [P] int64
    first_token: int,
) -> None:
    """Count the first `counts` tokens of each place, whose columns begin at first_token."""
    columns, size = token_ids - first_token, seen.shape[1]
    is_new = torch.arange(token_ids.shape[1], device=seen.device) < counts[:, None]
    is_new &= (columns >= 0) & (columns < size)
    index = places[:, None] * size + columns.clamp(0, size - 1)
    seen.view(-1).scatter_add_(0, index.flatten(), is_new.int().flatten())
