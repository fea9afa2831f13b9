"""Compiles kernels from other sources, or for other processors."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdec.config.hardware import default_cache_dir
from specdec.kernels.cpu import build

KERNELS = Path(build.__file__).parent


def compiled(sources: Sequence[Path], *flags: str) -> ctypes.CDLL:
    """Compile `sources` with the kernels' headers; `flags` override the project's.

    The library stays in the cache, beside the kernels of the package, until a source changes.
    """
    directory = default_cache_dir() / "test-kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
        return ctypes.CDLL(str(build.build([*sources, *KERNELS.glob("*.h")], directory)))
