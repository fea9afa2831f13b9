import gc
import weakref

from specdec.kernels.native.panel_memory import PanelMemory


def test_pieces_are_zeros_aligned_and_apart():
    memory = PanelMemory()
    pieces = [memory.take(size) for size in (1, 64, 65, 2**20 + 3, 2**26, 7)]
    for mark, piece in enumerate(pieces, 1):
        assert not piece.any()
        assert piece.data_ptr() % 64 == 0
        piece.fill_(mark)
    assert [len(piece) for piece in pieces] == [1, 64, 65, 2**20 + 3, 2**26, 7]
    assert all((piece == mark).all() for mark, piece in enumerate(pieces, 1))


def test_small_pieces_share_a_block():
    memory = PanelMemory()
    first, second = memory.take(1000), memory.take(1000)
    assert second.data_ptr() == first.data_ptr() + 1024


def test_a_block_goes_with_its_last_piece():
    memory = PanelMemory()
    piece = memory.take(2**26)
    gone = weakref.ref(piece.untyped_storage())
    memory.take(2**26)
    del piece
    gc.collect()
    assert gone() is None
