"""The tests of this folder run Triton's interpreter on CPU tensors (`tests/conftest.py`).

`make test-triton` installs Triton and runs the slow ones too.
"""

from importlib.util import find_spec

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # tests/specdec/kernels/test_triton.py is skipped instead
