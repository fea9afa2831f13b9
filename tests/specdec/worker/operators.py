"""Counts of the operators that a function launches, by a dispatch mode of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Records the calls in its context; views and uninitialized tensors launch nothing.

    calls: each operator with its arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not (_is_view(func) or "view" in str(func) or "empty" in str(func)):
            self.calls.append((str(func), args))
        return result

    @property
    def counts(self) -> Counter[str]:
        return Counter(name for name, _ in self.calls)


def _is_view(func: Any) -> bool:
    results = func._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in results)


def assert_host_reads_nothing(function: Callable[[], object]) -> None:
    """Run a function on tensors without data: it fails to read a value, or a shape made of values.

    That is item(), tolist(), bool(), nonzero(), a boolean mask as an index, and a copy to numpy.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        function()


def assert_one_copy_goes_each_way(steps, operators):
    """Check that a step copied one buffer of the host to the device, and one result back."""
    inputs, outputs = (
        {each.data_ptr() for each in side}
        for side in zip(*[(buffer.input, buffer.output) for buffer in steps._buffers], strict=True)
    )
    copies = [args[:2] for name, args in operators.calls if name.startswith("aten.copy_")]
    assert sum(source.data_ptr() in inputs for _, source in copies) == 1
    assert sum(target.data_ptr() in outputs for target, _ in copies) == 1
