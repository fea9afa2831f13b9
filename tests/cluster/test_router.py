"""What a Router says before its models run."""

import json
import shutil

import pytest

from cluster.config import ServeConfig
from cluster.models import ModelDirectories
from cluster.router import Router
from specdec.sampling_params import SamplingDefaults

WISHES = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 99}


@pytest.fixture
def model_dir(tiny_model_dir, tmp_path):
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **WISHES}))
    return directory


@pytest.mark.parametrize(
    ("setting", "defaults"),
    [
        ("auto", SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, max_tokens=99)),
        ("none", SamplingDefaults()),
    ],
)
def test_the_models_wishes_hold_unless_they_are_left_aside(model_dir, setting, defaults):
    config = ServeConfig(model=str(model_dir), generation_config=setting, max_model_len=128)
    router = Router(config, ModelDirectories(model_dir, None), memory_bytes=2**32)
    assert router.model_info("").sampling_defaults == defaults
    assert router.spell([0, 50]) == ["<|endoftext|>", "P"]
