import gc
import weakref
from pathlib import Path

import pytest

from specdec.kernels.cpu.large_memory import HugePageAllocator


def test_pieces_are_zeros_aligned_and_apart():
    memory = HugePageAllocator()
    pieces = [memory.allocate(size) for size in (1, 64, 65, 2**20 + 3, 2**26, 7)]
    for mark, piece in enumerate(pieces, 1):
        assert not piece.any()
        assert piece.data_ptr() % 64 == 0
        piece.fill_(mark)
    assert [len(piece) for piece in pieces] == [1, 64, 65, 2**20 + 3, 2**26, 7]
    assert all((piece == mark).all() for mark, piece in enumerate(pieces, 1))


def test_small_pieces_share_a_block():
    memory = HugePageAllocator()
    first, second = memory.allocate(1000), memory.allocate(1000)
    assert second.data_ptr() == first.data_ptr() + 1024


MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="/proc is not mounted")
def test_memory_is_private():
    """Shared memory gets huge pages only if shmem_enabled is set; it is off by default."""
    piece = HugePageAllocator().allocate(1000)
    address = piece.data_ptr()
    for line in MAPS.read_text().splitlines():
        place, permissions, *_ = line.split()
        begin, end = (int(bound, 16) for bound in place.split("-"))
        if begin <= address < end:
            assert permissions == "rw-p"
            return
    raise AssertionError("the memory is not mapped")


@pytest.mark.parametrize("size", [1000, 2**26])
def test_a_block_goes_with_its_last_piece(size):
    memory = HugePageAllocator()
    piece = memory.allocate(size)
    gone = weakref.ref(piece.untyped_storage())
    memory.allocate(2**25 - 1)
    del piece
    gc.collect()
    assert gone() is None
