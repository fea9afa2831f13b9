import gc
import weakref

from cluster.workers.rank.heap import freeze_heap


class Node:
    """An object that may be part of a cycle."""


def test_loaded_objects_are_kept_and_leftovers_freed():
    """They stay kept: so are all modules, which make each full collection take a second."""
    kept, leftover = Node(), Node()
    kept.self, leftover.self = kept, leftover
    is_alive = weakref.ref(leftover)
    del leftover
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    freeze_heap()
    assert is_alive() is None
    assert gc.get_freeze_count() > before
    assert gc.get_threshold()[0] == 10_000
    gc.set_threshold(*thresholds)
    assert not any(each is kept for each in gc.get_objects())
