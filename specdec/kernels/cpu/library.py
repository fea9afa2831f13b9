"""The compiled kernels of this machine, as functions of a C library."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch  # noqa: F401 (loads the OpenMP library that the kernels share)

from specdec.config.paths import default_cache_dir
from specdec.kernels.cpu.build import BuildError, build

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent


def native_library() -> ctypes.CDLL | None:
    """Compiles the kernels where that was not done yet; None where it cannot be, with a warning.

    Calls release the interpreter's lock. Threads are torch's: `torch.set_num_threads` applies.
    """
    return _compiled().library


def native_library_fault() -> str:
    """Why there is no library, or nothing; compiles it where that was not done yet."""
    return _compiled().fault


@dataclass(frozen=True)
class _Compiled:
    """The library, or why there is none."""

    library: ctypes.CDLL | None = None
    fault: str = ""


@cache
def _compiled() -> _Compiled:
    sources = [*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]
    try:
        return _Compiled(ctypes.CDLL(str(build(sources, default_cache_dir() / "kernels"))))
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels are not available, torch's run instead: %s", error)
        return _Compiled(fault=str(error))
