"""Collectives between the ranks of a tensor-parallel group, and how GPUs of one sum."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.kernels.symmetric_memory import SymmetricMemory

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_GATHERED_BYTES = 2**24
"""Part of a tensor that is gathered from every rank at once, to be summed in order."""


_NARROW = (torch.bfloat16, torch.float16)


class Exchange(Protocol):
    """Exchange of tensors between the ranks of a group.

    Every rank must call the same collectives in the same order. Calls raise RuntimeError when a
    peer dies.
    """

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every rank's `tensor` (equal shapes) to [size, *tensor.shape]."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send `parts[rank]` to each rank; return what each rank sent here, of the same shape.

        parts: [size, ...], of equal shapes on all ranks.
        """

    def describe(self) -> str:
        """Return how tensors are exchanged, for the log."""


class Collectives(Exchange, Protocol):
    """Collective communication between the ranks of a group."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks, in place."""


@dataclass(frozen=True)
class ProcessGroupCollectives:
    """Collectives of `torch.distributed`: NCCL between GPUs, Gloo between CPUs."""

    process_group: dist.ProcessGroup
    name: str

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks in place, in the order of the backend."""
        dist.all_reduce(tensor, group=self.process_group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor`, [size, *tensor.shape]."""
        own = tensor.contiguous()
        gathered = own.new_empty(self.process_group.size(), *own.shape)
        dist.all_gather_single(gathered.view(-1), own.view(-1), group=self.process_group)
        return gathered

    def all_to_all(self, parts: Tensor) -> Tensor:
        """See Collectives."""
        own = parts.contiguous()
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own, group=self.process_group)
        return received

    def describe(self) -> str:
        """See Collectives."""
        return self.name


@dataclass(frozen=True)
class OneShotCollectives:
    """Collectives whose small sums are one kernel over symmetric memory.

    Which of the two ways a sum takes follows from its shape and type, so it is equal on all ranks.
    """

    others: Collectives
    memory: SymmetricMemory

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks in place; a small one in the order of the ranks."""
        if self.memory.fits(tensor):
            self.memory.all_reduce(tensor)
        else:
            self.others.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See Collectives."""
        return self.others.all_gather(tensor)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """See Collectives."""
        return self.others.all_to_all(parts)

    def describe(self) -> str:
        """See Collectives."""
        limit = f"{self.memory.max_bytes / 2**20:g} MiB"
        return f"{self.others.describe()}, and sums of up to {limit} in one shot"


@dataclass(frozen=True)
class OrderedCollectives:
    """Collectives whose sums add the ranks in order, whatever the size of a tensor is.

    So the bits of a row depend neither on its batch nor on the topology of the GPUs. Numbers are
    added one after the other, in the type of the tensor as symmetric memory does. memory: None
    where there is none; the ranks then gather what they sum. is_wide: whether 16-bit numbers that
    were gathered are added in float32 and rounded once, as in shared memory between CPUs.
    """

    others: Exchange
    memory: SymmetricMemory | None = None
    is_wide: bool = False

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks in place, in their order."""
        contiguous = tensor.contiguous()
        self._add_up(contiguous.view(-1))
        if contiguous is not tensor:
            tensor.copy_(contiguous)

    def _add_up(self, flat: Tensor) -> None:
        memory = self.memory
        if memory is not None and memory.takes(flat):
            for part in flat.split(memory.max_bytes // flat.element_size()):
                memory.all_reduce(part)
            return
        for part in flat.split(_GATHERED_BYTES // flat.element_size()):
            first, *others = self.others.all_gather(part)
            total = first.float() if self.is_wide and first.dtype in _NARROW else first
            for other in others:
                total += other
            part.copy_(total)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See Collectives."""
        return self.others.all_gather(tensor)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """See Collectives."""
        return self.others.all_to_all(parts)

    def describe(self) -> str:
        """See Collectives."""
        way = "gathered" if self.memory is None else "in one shot"
        return f"{self.others.describe()}, and sums {way}, in the order of the ranks"


def gpu_collectives(
    group: ProcessGroupCollectives,
    device: torch.device,
    *,
    is_custom: bool,
    is_ordered: bool,
    kind: type[SymmetricMemory] = SymmetricMemory,
) -> Collectives:
    """Return the collectives of ranks on GPUs of one node; a collective call.

    All ranks sum in one shot, or none does: where one of them cannot, the reason is logged.

    is_custom: whether sums in one shot are wanted. is_ordered: whether every sum has to add the
    ranks in order.
    """
    memory = _common_memory(group, device, kind) if is_custom else None
    if is_ordered:
        return OrderedCollectives(group, memory)
    return group if memory is None else OneShotCollectives(group, memory)


class _UnavailableError(Exception):
    """Symmetric memory that some rank cannot use, with the reason on this one."""


def _common_memory(
    group: ProcessGroupCollectives, device: torch.device, kind: type[SymmetricMemory]
) -> SymmetricMemory | None:
    """Return symmetric memory that sums correctly on every rank, or None on all of them.

    Before each part in which ranks wait for each other they agree to go on.
    """
    rank, size = group.process_group.rank(), group.process_group.size()
    try:
        _agree(group, kind.local_fault())
        _agree(group, kind.peer_fault(device, group.all_gather))
        buffer = _on_all(group, lambda: kind.allocate(device))
        memory = _on_all(group, lambda: kind.open(buffer, group.process_group))
        _agree(group, memory.fault(rank, size))
    except _UnavailableError as error:
        logger.info("rank %d sums by %s: %s", rank, group.name, error)
        return None
    return memory


def _on_all(group: ProcessGroupCollectives, part: Callable[[], _Result]) -> _Result:
    """Return what a part returns; raise _UnavailableError on all ranks where it fails on one."""
    results, fault = list[_Result](), ""
    try:
        results.append(part())
    except RuntimeError as error:
        fault = str(error) or type(error).__name__
    _agree(group, fault)
    return results[0]


def _agree(group: ProcessGroupCollectives, fault: str) -> None:
    """Raise _UnavailableError on every rank where one has a fault; exchanged between the hosts."""
    if bool(group.all_gather(torch.tensor([bool(fault)], dtype=torch.int32)).any()):
        raise _UnavailableError(fault or "another rank cannot sum in one shot")
