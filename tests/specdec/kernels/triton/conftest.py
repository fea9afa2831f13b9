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


@pytest.fixture(scope="module", autouse=True)
def products_row_by_row():
    """Let the interpreter multiply each row of a tile alone.

    In numpy's product of a whole tile the sums of a row depend on its place, unlike on a GPU.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, left, right, total, *precision):
        rows = TensorHandle(left.data[..., None, :], left.dtype)
        matrix = TensorHandle(right.data[..., None, :, :], right.dtype)
        sums = TensorHandle(total.data[..., None, :], total.dtype)
        found = multiply(self, rows, matrix, sums, *precision)
        return TensorHandle(found.data[..., 0, :], found.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield
