"""The host's side of a step on the device: its input, and the result that the host waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostBuffer:
    """Input and output of one step on the host, in memory that a device copies from and to."""

    def __init__(self, input_size: int, output_size: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self.input = torch.zeros(input_size, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        self.output = torch.zeros(
            output_size, dtype=torch.int64, device="cpu", pin_memory=is_pinned
        )
        self.words: NDArray[np.int64] = self.input.numpy()


@dataclass(frozen=True)
class PendingTokens:
    """The new tokens of a step that the device runs."""

    # Both int64 on the host: in a row the number of tokens, then tokens.
    _result: Tensor  # [num_rows, 1 + Q]
    _drafts: Tensor | None  # [num_rows, 1 + max_draft_tokens], of a head; None if it made none
    _done: torch.cuda.Event | None  # None where the device is the host

    @property
    def is_done(self) -> bool:
        """Return whether the step has ended."""
        return self._done is None or self._done.query()

    def collect(self) -> list[tuple[int, ...]]:
        """Wait for the step; return the new tokens of each row, none for invalid logits."""
        if self._done is not None:
            self._done.synchronize()
        return _listed(self._result)

    def drafts(self) -> list[tuple[int, ...]]:
        """Return what a head has drafted behind each row; call it behind `collect`."""
        return [()] * len(self._result) if self._drafts is None else _listed(self._drafts)


def _listed(rows: Tensor) -> list[tuple[int, ...]]:
    """Return the tokens of rows, each with their number in front."""
    return [tuple(tokens[:count]) for count, *tokens in rows.tolist()]


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind what the device was given so far; None on the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
