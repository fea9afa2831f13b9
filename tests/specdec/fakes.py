"""Fakes of the collectives: ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from specdec.kernels.tensor_parallel import TensorParallelGroup

Result = TypeVar("Result")


class Exchange:
    """Exchange of tensors between threads that are ranks."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=100)  # a loaded machine is slow
        self._tensors: list[Tensor | None] = [None] * size

    def swap(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, when all ranks have called."""
        self._tensors[rank] = tensor.clone()
        self._barrier.wait()
        tensors = [other for other in self._tensors if other is not None]
        self._barrier.wait()
        return tensors

    def abort(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True)
class ThreadGroup(TensorParallelGroup):
    """A rank that is a thread; it records its collectives."""

    exchange: Exchange = field(default_factory=lambda: Exchange(1))
    called: list[str] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.called.append("all_reduce")
        return tensor.copy_(torch.stack(self.exchange.swap(self.rank, tensor)).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.called.append("all_gather")
        return torch.stack(self.exchange.swap(self.rank, tensor))

    def all_to_all(self, parts: Tensor) -> Tensor:
        self.called.append("all_to_all")
        return torch.stack([sent[self.rank] for sent in self.exchange.swap(self.rank, parts)])


def run_ranks(size: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Return the result of `work` on each of `size` concurrent ranks."""
    exchange = Exchange(size)

    def run(rank: int) -> Result:
        try:
            return work(ThreadGroup(rank=rank, size=size, exchange=exchange))
        except BaseException:
            exchange.abort()  # the other ranks must not wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
