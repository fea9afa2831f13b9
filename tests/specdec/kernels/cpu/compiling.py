"""Libraries of other sources, or for other processors, than the one that the project runs."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdec.kernels.cpu import build

KERNELS = Path(build.__file__).parent


def compiled(sources: Sequence[Path], directory: Path, *flags: str) -> ctypes.CDLL:
    """The library of `sources` and the kernels' headers; later flags overrule the project's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
        return ctypes.CDLL(str(build.build([*sources, *KERNELS.glob("*.h")], directory)))
