"""The tests of this folder run Triton's interpreter on CPU tensors (`tests/conftest.py`).

`make test-triton` installs Triton and runs the slow ones too.
"""

import threading
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # reference/test_triton_availability.py is skipped instead


@pytest.fixture
def one_launch_at_a_time(monkeypatch):
    """Let ranks that are threads launch kernels in turn: the interpreter has one state."""
    from triton.runtime.interpreter import GridExecutor

    lock, call = threading.Lock(), GridExecutor.__call__

    def locked(self, *arguments, **options):
        with lock:
            return call(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", locked)
