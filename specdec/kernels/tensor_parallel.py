"""Tensor-parallel groups: rendezvous of the ranks, and their collectives."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from specdec.kernels.collectives import (
    Collectives,
    OrderedCollectives,
    ProcessGroupCollectives,
    gpu_collectives,
)
from specdec.kernels.cpu import SharedMemory, native_library
from specdec.types.sharding import partition

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send `parts[rank]` to each rank, [size, ...]; return what each rank sent here."""
        return parts if self.collectives is None else self.collectives.all_to_all(parts)

    @property
    def adds_in_order(self) -> bool:
        """Return whether sums add the ranks in order, so that no bit depends on a tensor's size."""
        return self.collectives is None or isinstance(
            self.collectives, OrderedCollectives | SharedMemory
        )

    def describe(self) -> str:
        """Return how tensors are exchanged, for the log."""
        return "nothing" if self.collectives is None else self.collectives.describe()

    def share_of(self, total: int) -> range:
        """Return this rank's shard of range(total)."""
        return partition(total, self.size)[self.rank]


@dataclass(frozen=True)
class Rendezvous:
    """Arguments with which one rank joins its group.

    device: device type. directory: shared by all ranks and private to them, initially empty.
    timeout: limit for the ranks to join, and for each collective. is_custom: whether GPUs may sum
    in one shot. is_ordered: whether the sums of GPUs have to add the ranks in order. store: where
    ranks on the GPUs of several nodes meet, instead of the directory; None where one node has all.
    """

    rank: int
    size: int
    device: str
    directory: Path
    timeout: timedelta
    is_custom: bool = True
    is_ordered: bool = False
    store: Store | None = None

    def join(self) -> TensorParallelGroup:
        """Join the group; returns when every rank has joined. Call it once per process.

        Ranks on GPUs use NCCL, and on one node sum small tensors in one shot where all of them can.
        Ranks on the CPUs of one node use shared memory if all of them have the native kernels.
        Other ranks use Gloo.
        """
        if self.size == 1:
            return TensorParallelGroup()
        joined = self._on_gpus() if self.device == "cuda" else self._on_cpus()
        return TensorParallelGroup(self.rank, self.size, joined)

    def _on_gpus(self) -> Collectives:
        """Join with NCCL for tensors on the GPU, and Gloo for what the hosts agree on.

        The device that is named makes NCCL connect now: a communicator cannot be created while a
        graph is captured.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        group = self._process_group("cpu:gloo,cuda:nccl", "NCCL", device)
        is_custom = self.is_custom and self.store is None
        return gpu_collectives(group, device, is_custom=is_custom, is_ordered=self.is_ordered)

    def _on_cpus(self) -> Collectives:
        group = self._process_group("gloo", "Gloo")
        if not _can_share_memory(group):
            return group
        library = native_library()
        assert library is not None, "the kernels were available during the check"
        address, timeout_s = self.directory / "shared-memory", self.timeout.total_seconds()
        shared_memory = SharedMemory(library, self.rank, self.size, address, timeout_s)
        dist.destroy_process_group()
        return shared_memory

    def _process_group(
        self, backend: str, name: str, device: torch.device | None = None
    ) -> ProcessGroupCollectives:
        dist.init_process_group(
            backend,
            store=self.store,
            init_method=f"file://{self.directory / 'rendezvous'}" if self.store is None else None,
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            device_id=device,
        )
        assert dist.group.WORLD is not None
        return ProcessGroupCollectives(dist.group.WORLD, name)


def _can_share_memory(group: ProcessGroupCollectives) -> bool:
    """Return whether all ranks are on one node and have the kernels; equal on all ranks."""
    can_share = native_library() is not None and _BOOT_ID.exists()
    node = uuid.UUID(_BOOT_ID.read_text().strip()).int >> 65 if can_share else -1
    nodes = group.all_gather(torch.tensor(node))
    return bool(((nodes == node) & (nodes >= 0)).all())
