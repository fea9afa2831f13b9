"""The ranks that share one model, and how they exchange tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.types.sharding import partition


class Collectives(Protocol):
    """How the ranks of a group exchange tensors.

    Every rank calls the same collectives in the same order; a peer that dies raises RuntimeError.
    """

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` over the ranks, in place."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stacks every rank's `tensor` (equal shapes) to [size, *tensor.shape]."""


@dataclass(frozen=True)
class ProcessGroupCollectives:
    """Those of `torch.distributed`: NCCL's between GPUs, Gloo's on CPUs."""

    process_group: dist.ProcessGroup

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums in the backend's order."""
        dist.all_reduce(tensor, group=self.process_group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape]."""
        parts = [torch.empty_like(tensor) for _ in range(self.process_group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=self.process_group)
        return torch.stack(parts)


@dataclass(frozen=True)
class TensorParallelGroup:
    """One rank's view of its tensor-parallel group. Size 1 needs no collectives."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over the ranks, in place, and returns it."""
        if self.collectives is not None:
            self.collectives.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stacks every rank's `tensor` (equal shapes) to [size, *tensor.shape]."""
        if self.collectives is None:
            return tensor.unsqueeze(0)
        return self.collectives.all_gather(tensor)

    def share_of(self, total: int) -> range:
        """The indices of a dimension of `total` that this rank holds."""
        return partition(total, self.size)[self.rank]
