"""The heap of a process whose models are loaded."""

import gc


def freeze_heap() -> None:
    """Free what loading has left over, and take all other objects out of later collections.

    They live as long as the process: libraries, models and graphs, some 400,000 objects. A full
    collection would visit each of them, which delays a step by 0.2 s.
    """
    gc.collect()
    gc.freeze()
