"""Sums over the GPUs of a node in one kernel, which reads the operands from the peers' memory.

NCCL's all-reduce of a few kilobytes takes its latency, not the time of its bytes, and a decode step
has two a layer. In one shot each rank writes its operand to memory that its peers can read, waits
for theirs, and adds up all of them: one exchange of signals, and `size` times the bytes, so it is
for small tensors. The kernel is torch's (`torch.distributed._symmetric_memory`), and adds the ranks
in order: the sums have equal bits on all of them. A graph can hold it.

A separate launch copies the operand. Torch's kernel that copies it too
(`one_shot_all_reduce_copy`) lets the first warp of a block signal the peers before the other warps
have written their part: `sync_remote_blocks` waits for no warp, and nothing else does before.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.kernels.nvlink import gpu_id, nvlink_fault

_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16
"""Bytes. The kernel demands equal alignments of its operands; the buffer has this one."""

_SHARED_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Torch takes devices of equal index for one device. Ray shows each rank its own GPU alone, so the
index is 0 on all of them. NCCL refuses two ranks on one GPU."""

_LONGEST_SUM_S = 20.0
_POLL_S = 1e-3


@dataclass(frozen=True)
class SymmetricMemory:
    """A buffer of this rank that the kernels of its peers read, as they do theirs.

    buffer: [max_bytes] uint8. group_name: of the process group, by which torch finds the peers.
    """

    buffer: Tensor
    group_name: str

    max_bytes: ClassVar[int] = 2**20

    @staticmethod
    def local_fault() -> str:
        """Return why this process cannot open symmetric memory, or an empty string."""
        has_kernel = hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out")
        return "" if has_kernel else "this build of torch has no symmetric memory"

    @staticmethod
    def peer_fault(device: torch.device, gather: Callable[[Tensor], Tensor]) -> str:
        """Return why the GPUs of the ranks may not signal each other, or an empty string.

        A collective call. gather: returns a tensor of each rank's host, stacked.
        """
        own = torch.tensor(list(gpu_id(device).bytes), dtype=torch.int32)
        return nvlink_fault([uuid.UUID(bytes=bytes(each)) for each in gather(own).tolist()])

    @classmethod
    def allocate(cls, device: torch.device) -> Tensor:
        """Return the buffer of this rank; raise RuntimeError where it has none."""
        buffer: Tensor = _symmetric().empty(cls.max_bytes, dtype=torch.uint8, device=device)
        return buffer

    @classmethod
    def open(cls, buffer: Tensor, group: dist.ProcessGroup) -> SymmetricMemory:
        """Map the buffers of all ranks of a group; a collective call.

        Raises RuntimeError where the GPUs have no access to each other.
        """
        os.environ.setdefault(_SHARED_DEVICES, "1")
        _symmetric().rendezvous(buffer, group)
        return cls(buffer, group.group_name)

    def takes(self, tensor: Tensor) -> bool:
        """Return whether the kernel adds tensors of this type and layout, of any size."""
        offset = tensor.storage_offset() * tensor.element_size()
        return (
            tensor.device == self.buffer.device
            and tensor.dtype in _DTYPES
            and tensor.is_contiguous()
            and offset % _ALIGNMENT == 0
            and tensor.nbytes % _ALIGNMENT == 0
        )

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor can be summed in one piece; follows from shape and type."""
        return 0 < tensor.nbytes <= self.max_bytes and self.takes(tensor)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor that fits over the ranks, in place and in their order; two launches.

        The copy may overwrite the operand of the sum before: its kernel ends when all have read.
        """
        flat = tensor.view(-1)
        own = self.buffer.view(tensor.dtype)[: flat.numel()]
        own.copy_(flat)
        torch.ops.symm_mem.one_shot_all_reduce_out(own, "sum", self.group_name, flat)

    def fault(self, rank: int, size: int) -> str:
        """Sum known numbers; return what is wrong with the result, or an empty string.

        A collective call that waits for the device. Raises TimeoutError where the sum does not end:
        its kernel waits for signals of the peers, so the device cannot be used any more.
        """
        count = self.max_bytes // 4
        places = torch.arange(count, device=self.buffer.device, dtype=torch.float32)
        found = places + rank
        self.all_reduce(found)
        self._wait()
        wanted = size * places + size * (size - 1) // 2
        return "" if torch.equal(found, wanted) else "a sum in one shot is wrong"

    def _wait(self) -> None:
        if not self.buffer.is_cuda:
            return
        event = torch.cuda.Event()
        event.record()
        ends_at_s = time.monotonic() + _LONGEST_SUM_S
        while not event.query():
            if time.monotonic() > ends_at_s:
                raise TimeoutError(
                    f"a sum over symmetric memory did not end within {_LONGEST_SUM_S:g} s; start "
                    "with --disable-custom-all-reduce to sum by NCCL"
                )
            time.sleep(_POLL_S)


def _symmetric() -> Any:
    """Return torch's module, which has no types."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory
