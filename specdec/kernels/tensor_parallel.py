"""Tensor-parallel groups: rendezvous of the ranks, and their collectives."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.kernels.cpu import SharedMemory, native_library
from specdec.types.sharding import partition

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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


@dataclass(frozen=True)
class Rendezvous:
    """Arguments with which one rank joins its group.

    device: device type. directory: shared by all ranks and private to them, initially empty.
    timeout: limit for the ranks to join, and for each collective.
    """

    rank: int
    size: int
    device: str
    directory: Path
    timeout: timedelta

    def join(self) -> TensorParallelGroup:
        """Join the group; returns when every rank has joined. Call it once per process.

        Ranks on GPUs use NCCL. Ranks on the CPUs of one node use shared memory if all of them have
        the native kernels. Other ranks use Gloo.
        """
        if self.size == 1:
            return TensorParallelGroup()
        return TensorParallelGroup(self.rank, self.size, self._collectives())

    def _collectives(self) -> Collectives:
        dist.init_process_group(
            "gloo" if self.device == "cpu" else "nccl",
            init_method=f"file://{self.directory / 'rendezvous'}",
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
        )
        assert dist.group.WORLD is not None
        process_group = ProcessGroupCollectives(dist.group.WORLD)
        if self.device != "cpu" or not _can_share_memory(process_group):
            return process_group
        library = native_library()
        assert library is not None, "the kernels were available during the check"
        address, timeout_s = self.directory / "shared-memory", self.timeout.total_seconds()
        shared_memory = SharedMemory(library, self.rank, self.size, address, timeout_s)
        dist.destroy_process_group()
        return shared_memory


def _can_share_memory(group: ProcessGroupCollectives) -> bool:
    """Return whether all ranks are on one node and have the kernels; equal on all ranks."""
    can_share = native_library() is not None and _BOOT_ID.exists()
    node = uuid.UUID(_BOOT_ID.read_text().strip()).int >> 65 if can_share else -1
    nodes = group.all_gather(torch.tensor(node))
    return bool(((nodes == node) & (nodes >= 0)).all())
