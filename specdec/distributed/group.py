"""Tensor-parallel groups and their collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.types.sharding import partition


class Collectives(Protocol):
    """Collective communication between the ranks of a group.

    Every rank must call the same collectives in the same order. Calls raise RuntimeError when a
    peer dies.
    """

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks, in place."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every rank's `tensor` (equal shapes) to [size, *tensor.shape]."""


@dataclass(frozen=True)
class ProcessGroupCollectives:
    """Collectives of `torch.distributed`: NCCL between GPUs, Gloo on CPUs."""

    process_group: dist.ProcessGroup

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks in place, in the order of the backend."""
        dist.all_reduce(tensor, group=self.process_group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor`, [size, *tensor.shape]."""
        parts = [torch.empty_like(tensor) for _ in range(self.process_group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=self.process_group)
        return torch.stack(parts)


@dataclass(frozen=True)
class TensorParallelGroup:
    """One rank's view of its tensor-parallel group; a group of size 1 has no collectives."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks in place, and return it."""
        if self.collectives is not None:
            self.collectives.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every rank's `tensor` (equal shapes) to [size, *tensor.shape]."""
        if self.collectives is None:
            return tensor.unsqueeze(0)
        return self.collectives.all_gather(tensor)

    def share_of(self, total: int) -> range:
        """Return this rank's shard of range(total)."""
        return partition(total, self.size)[self.rank]
