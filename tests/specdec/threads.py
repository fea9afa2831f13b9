"""Tests run on one thread, but for those that are about threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Has torch, and the native kernels with it, use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
