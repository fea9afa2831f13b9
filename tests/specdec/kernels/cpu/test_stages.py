"""Invariant test of the work-stealing barrier: each task runs once, before the next stage."""

import ctypes
from pathlib import Path

import pytest

from specdec.kernels.cpu import native_library
from tests.specdec.kernels.cpu.compiling import compiled

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")

NUM_STAGES = 5000


@pytest.fixture(scope="module")
def count_faults():
    library = compiled([Path(__file__).with_name("stages.cpp")])
    library.count_faults.argtypes = (ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64)
    library.count_faults.restype = ctypes.c_int64
    return library.count_faults


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_stage_starts_after_all_earlier_tasks(num_threads, seed, count_faults):
    assert count_faults(num_threads, NUM_STAGES, seed << 32) == 0
