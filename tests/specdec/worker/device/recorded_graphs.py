"""Graphs of torch's operators on a CPU, with what CUDA's graphs have and a function has not.

A replay runs the operators of the capture again, on the same tensors and the same numbers of
Python. The tensors that a capture makes belong to its graph, whose memory other graphs use too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.worker.device.step_graphs import GraphCaptureError
from tests.specdec.worker.device.runners import FakeGraphs

_WAITING = (
    *("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal"),
    *("aten._unique2", "aten.unique_dim", "aten.unique_consecutive", "aten.bincount"),
)
"""Operators that wait for the device. Not seen are reads without one, by tolist(), numpy() or
tensor_split(), copies to the CPU, and repeat_interleave(), which waits where it has no size.
`assert_host_reads_nothing` sees most of these.
"""
_FOREIGN = {torch.bool: True, torch.uint8: 77, torch.int8: -77, torch.int16: -7777}
_FOREIGN_INTEGER = -(2**30)


class RecordedGraphs(FakeGraphs):
    """Graphs that repeat the operators of their capture; on one rank, and by torch's kernels.

    num_captured, num_replays: as in FakeGraphs.
    """

    def __init__(self) -> None:
        super().__init__(runs_captured=True)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        function()  # as CUDA's graphs do
        recording = _Recording()
        with recording:
            function()
        recording.spoil()
        self.num_captured += 1

        def replay() -> None:
            self.num_replays += 1
            recording.replay()

        return replay


def graphs_of(*, is_recorded: bool) -> FakeGraphs:
    """Return recorded graphs, which take longer, or graphs that call the captured function."""
    return RecordedGraphs() if is_recorded else FakeGraphs(runs_captured=True)


class _Call(NamedTuple):
    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: list[tuple[int, Tensor]]  # results in new memory, by their place


class _Recording(TorchDispatchMode):
    """The operators that run in its context."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        _require_capturable(func, args)
        result = func(*args, **options)
        given = {_memory(each) for each in (*_tensors(args), *_tensors(options))}
        made = [
            (place, each)
            for place, each in enumerate(_tensors(result))
            if each.numel() and _memory(each) not in given
        ]
        self._calls.append(_Call(func, args, options, made))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for function, arguments, options, made in self._calls:
            found = _tensors(function(*arguments, **options))
            for place, own in made:
                own.copy_(found[place])
        self.spoil()

    @torch.inference_mode()
    def spoil(self) -> None:
        """Overwrite the memory of the graph, as the next one does."""
        for call in self._calls:
            for _, own in call.made:
                own.fill_(
                    torch.nan
                    if own.is_floating_point()
                    else _FOREIGN.get(own.dtype, _FOREIGN_INTEGER)
                )


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors of arguments or results of an operator: in lists, at any depth.

    Torch's trees are general, and take a third of the time of a capture.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for each in values for tensor in _tensors(each)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _require_capturable(function: Any, arguments: Any) -> None:
    """Raise GraphCaptureError for an operator that CUDA permits in no capture."""
    waits, is_lifted, is_index = _kind_of(function)
    if is_lifted:  # of one number, as a device fills it in an assignment to a slice
        waits = any(each.dim() for each in _tensors(arguments))
    elif is_index and not waits:
        indices = (each for each in _tensors(arguments[1:2]) if each.dtype == torch.bool)
        waits = any(each.dim() for each in indices)
    if waits:
        raise GraphCaptureError(f"{function} in a capture")


@cache
def _kind_of(function: Any) -> tuple[bool, bool, bool]:
    """Return whether an operator waits for the device, copies a constant, or takes indices."""
    name = str(function)
    waits = any(name.startswith(f"{each}.") for each in _WAITING)
    return waits, "lift_fresh" in name, "index" in name
