import pytest

from tests.specdec.training.targets import small_target, written_samples


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return small_target(tmp_path_factory.mktemp("trained_target"))


@pytest.fixture(scope="session")
def samples(target):
    return written_samples(target)
