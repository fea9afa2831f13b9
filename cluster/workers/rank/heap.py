"""The heap of a process whose models are loaded."""

import ctypes
import gc
from contextlib import suppress

_MAX_YOUNG = 10_000
"""New objects before a collection, which visits those of all open requests. Python's 700 are fewer
than sixteen requests have."""


def freeze_heap() -> None:
    """Free what loading has left over, and take all other objects out of later collections.

    They live as long as the process: libraries, models and graphs, some 400,000 objects. A full
    collection would visit each of them, which delays a step by 0.2 s. The C library keeps freed
    memory, some 40 MB after a tokenizer of 128,000 tokens; it is returned to the system.
    Collections of young objects become rarer.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()
    gc.set_threshold(_MAX_YOUNG)
