# Modules: specdec.kernels.triton.attention, specdec.kernels.triton.recurrence
"""Kernels replace all methods of torch's definitions: a missing one would run in torch."""

import pytest

from specdec.kernels.reference.paged_attention import PagedAttention
from specdec.kernels.reference.recurrent.recurrence import RecurrenceKernels
from specdec.kernels.reference.rows import RowKernels
from specdec.kernels.triton.attention import TritonAttention
from specdec.kernels.triton.recurrence import TritonRecurrence
from specdec.kernels.triton.rows import TritonRowKernels
from specdec.sampling.row_ops import RowOps, TritonRowOps


@pytest.mark.parametrize(
    ("kernels", "definition", "inherited"),
    [
        (TritonRowKernels, RowKernels, set()),
        (TritonRecurrence, RecurrenceKernels, set()),
        (TritonAttention, PagedAttention, {"rotate_and_run", "run"}),
        (TritonRowOps, RowOps, {"sample_batch", "edit"}),  # which call others
    ],
)
def test_each_method_of_a_definition_has_a_kernel(kernels, definition, inherited):
    assert kernels.__base__ is definition
    methods = {
        name
        for name, value in vars(definition).items()
        if callable(value) and not name.startswith("_")
    }
    assert len(methods) >= 3
    assert methods - vars(kernels).keys() == inherited
