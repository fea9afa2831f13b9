"""Low-rank updates of a linear layer by the adapters of a batch, which lie side by side in memory.

Fixed addresses and shapes: a pass names adapters by a tensor of places, so that a graph can hold it
and adapters can come and go between its replays. `specdec.kernels.triton.lora` computes it on a
GPU; `add_updates` is its definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoraStack:
    """Places for the updates of one linear layer; an empty place holds zeros.

    columns: of the layer's output, by projection; they follow each other. Those of projection p are
    updated by the ranks from p * rank on.
    """

    downs: Tensor  # [num_places, num_projections * rank, inputs]
    ups: Tensor  # [num_places, rank, outputs], scaled
    columns: tuple[range, ...]

    @classmethod
    def empty(
        cls,
        num_places: int,
        rank: int,
        num_inputs: int,
        columns: Sequence[range],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LoraStack:
        """Return empty places for updates of ranks up to `rank`, a power of 2 of at least 16."""
        size = sum(map(len, columns))
        downs = torch.zeros(num_places, len(columns) * rank, num_inputs, dtype=dtype, device=device)
        ups = torch.zeros(num_places, rank, size, dtype=dtype, device=device)
        return cls(downs, ups, tuple(columns))

    @property
    def rank(self) -> int:
        return self.ups.shape[1]


AddUpdates = Callable[[Tensor, Tensor, Tensor, LoraStack], None]
"""Adds the updates of x [T, inputs] to y [T, outputs] in place, by places [T] int32.

places: 1 + the place of the adapter of each row, 0 without one. Rows without one stay as they are.
"""


def add_updates(y: Tensor, x: Tensor, places: Tensor, stack: LoraStack) -> None:
    """Add the updates of all places, one after the other; see AddUpdates.

    The products with A are rounded to the type of the weights, as a torch linear layer does.
    """
    rank = stack.rank
    for place in range(len(stack.downs)):
        hidden = x @ stack.downs[place].t()
        parts = [
            hidden[:, index * rank : (index + 1) * rank]
            @ stack.ups[place, :, each.start : each.stop]
            for index, each in enumerate(stack.columns)
        ]
        is_own = (places == place + 1)[:, None]
        y.copy_(torch.where(is_own, y + torch.cat(parts, 1), y))
