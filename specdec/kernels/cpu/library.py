"""Loads the compiled kernels of this machine as a C library."""

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
    """Return the kernels, compiled on first use; None, with a warning, where that fails.

    Calls release the GIL. The kernels use torch's threads: `torch.set_num_threads` applies.
    """
    return _load().library


def native_library_fault() -> str:
    """Return why the kernels are not available, or an empty string; compiles on first use."""
    return _load().fault


@dataclass(frozen=True)
class _LoadResult:
    """The library, or the reason why it is missing."""

    library: ctypes.CDLL | None = None
    fault: str = ""


@cache
def _load() -> _LoadResult:
    sources = [*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]
    try:
        return _LoadResult(ctypes.CDLL(str(build(sources, default_cache_dir() / "kernels"))))
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels are not available; using torch kernels: %s", error)
        return _LoadResult(fault=str(error))
