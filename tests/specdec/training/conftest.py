import os

import pytest

from tests.specdec.training.targets import small_target, written_samples


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Return the target that all processes of the session share: read it, never write to it."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    return small_target(directory / "trained_target")


@pytest.fixture(scope="session")
def samples(target):
    return written_samples(target)
