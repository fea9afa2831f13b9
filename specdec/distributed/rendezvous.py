"""Rendezvous of the ranks of a model, and choice of their collectives."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from specdec.distributed.group import Collectives, ProcessGroupCollectives, TensorParallelGroup
from specdec.kernels.cpu import SharedMemory, native_library

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
