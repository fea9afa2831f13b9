"""The target that the heads in these tests belong to."""

import pytest

from specdec.models.config.model_config import ModelConfig
from tests.specdec.models.heads.driver import TARGET_SIZES
from tests.specdec.tiny import tiny_llama_dir


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("target"), **TARGET_SIZES)


@pytest.fixture(scope="session")
def target(target_dir):
    """The configuration of the target."""
    return ModelConfig.from_directory(target_dir)
