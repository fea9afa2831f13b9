"""Compiles kernels from other sources, or for other processors."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdec.kernels.cpu import build

KERNELS = Path(build.__file__).parent


def compiled(sources: Sequence[Path], directory: Path, *flags: str) -> ctypes.CDLL:
    """Compile `sources` with the kernels' headers; `flags` override the project's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
        return ctypes.CDLL(str(build.build([*sources, *KERNELS.glob("*.h")], directory)))
