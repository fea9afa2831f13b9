"""Compiles kernels from other sources, or for other processors."""

import ctypes
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from specdec.config.hardware import default_cache_dir
from specdec.kernels.cpu import build


def compiled(units: Sequence[Path], *flags: str) -> ctypes.CDLL:
    """Compile the .cpp files `units` with the kernels' headers; `flags` override the project's.

    The library stays in the cache, beside the kernels of the package, until a source changes.
    """
    directory = default_cache_dir() / "test-kernels"
    with TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        source = Path(temporary, "source")
        shutil.copytree(build.SOURCE, source, ignore=shutil.ignore_patterns("*.cpp"))
        for unit in units:
            shutil.copy(unit, source)
        patch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
        return ctypes.CDLL(str(build.build(source, directory)))
