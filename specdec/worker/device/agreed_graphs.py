"""Graphs of several ranks, which contain their collective operations.

A replay waits for the same replay on the other ranks, so a graph is captured on all of them or on
none, in one order. Capturing itself exchanges nothing: a rank that fails there can still report it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.worker.device.step_graphs import GraphBackend, GraphCaptureError, Replay

logger = logging.getLogger(__name__)


def graphs_of_ranks(
    backend: GraphBackend | None, group: TensorParallelGroup
) -> GraphBackend | None:
    """Return a backend that captures on all ranks; None on all where one has none.

    A collective call.
    """
    if group.size == 1:
        return backend
    if len(_ranks_where(backend is None, group)) > 0:
        if backend is not None:
            logger.warning("rank %d captures no graphs: not all ranks can", group.rank)
        return None
    assert backend is not None
    return AgreedGraphs(backend, group)


class AgreedGraphs:
    """A backend whose captures succeed on all ranks or raise on all of them."""

    def __init__(self, backend: GraphBackend, group: TensorParallelGroup) -> None:
        self._backend, self._group = backend, group

    def capture(self, function: Callable[[], None]) -> Replay:
        """Capture a function; a collective call. Raises GraphCaptureError, which names the ranks.

        An exception of the run before the capture ends this rank alone: its peers may wait for
        it in a collective operation, and the group is ended as a whole.
        """
        fault: GraphCaptureError | None = None
        try:
            replay = self._backend.capture(function)
        except GraphCaptureError as error:
            fault = error
        if failed := _ranks_where(fault is not None, self._group):
            if fault is not None:
                raise fault
            names = ", ".join(f"rank {rank}" for rank in failed)
            raise GraphCaptureError(f"{names} could not capture a graph that this rank has")
        return replay

    @property
    def num_bytes(self) -> int:
        """See GraphBackend."""
        return self._backend.num_bytes


def _ranks_where(is_so: bool, group: TensorParallelGroup) -> list[int]:
    """Return the ranks on which something is so; a collective call of the hosts."""
    flags = group.all_gather(torch.tensor([is_so], dtype=torch.int32))
    return [rank for rank, flag in enumerate(flags.flatten().tolist()) if flag]
