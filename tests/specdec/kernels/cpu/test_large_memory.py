import gc
import weakref
from pathlib import Path

import pytest

from specdec.kernels.cpu.large_memory import HugePageAllocator


def test_allocations_are_zero_aligned_and_disjoint():
    memory = HugePageAllocator()
    allocations = [memory.allocate(size) for size in (1, 64, 65, 2**20 + 3, 2**26, 7)]
    for mark, allocation in enumerate(allocations, 1):
        assert not allocation.any()
        assert allocation.data_ptr() % 64 == 0
        allocation.fill_(mark)
    assert [len(allocation) for allocation in allocations] == [1, 64, 65, 2**20 + 3, 2**26, 7]
    assert all((allocation == mark).all() for mark, allocation in enumerate(allocations, 1))


def test_small_allocations_share_a_block():
    memory = HugePageAllocator()
    first, second = memory.allocate(1000), memory.allocate(1000)
    assert second.data_ptr() == first.data_ptr() + 1024


MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="/proc is not mounted")
def test_memory_is_private():
    """Shared memory gets huge pages only if shmem_enabled is set; it is off by default."""
    allocation = HugePageAllocator().allocate(1000)
    address = allocation.data_ptr()
    for line in MAPS.read_text().splitlines():
        place, permissions, *_ = line.split()
        begin, end = (int(bound, 16) for bound in place.split("-"))
        if begin <= address < end:
            assert permissions == "rw-p"
            return
    raise AssertionError("the memory is not mapped")


@pytest.mark.parametrize("size", [1000, 2**26])
def test_block_is_freed_with_its_last_allocation(size):
    memory = HugePageAllocator()
    allocation = memory.allocate(size)
    gone = weakref.ref(allocation.untyped_storage())
    memory.allocate(2**25 - 1)
    del allocation
    gc.collect()
    assert gone() is None
