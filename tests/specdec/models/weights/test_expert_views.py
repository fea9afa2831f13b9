"""Experts in one tensor of a layer are those of separate tensors."""

import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import decoder_tensors
from specdec.models.config.model_config import ModelConfig
from specdec.models.weights.checks import check_tensors
from specdec.models.weights.expert_views import ExpertView, expert_views
from specdec.models.weights.stored_tensors import StoredTensors
from specdec.models.weights.tensor_headers import TensorHeaders
from specdec.models.weights.weight_files import read_headers
from tests.specdec.models.families import reference_model, save_family
from tests.specdec.models.passes import mixed_logits

WITH_STACKS = ("granite-4-moe", "qwen3.5-moe", "nemotron-h")
"""Families of which transformers writes stacks, in the published files or in its own."""


@pytest.mark.parametrize("name", WITH_STACKS)
def test_both_layouts_are_the_same_model(tmp_path, name):
    published, own = tmp_path / "published", tmp_path / "own"
    save_family(published, name)
    reference_model(published).save_pretrained(own, save_original_format=False)
    ids = [[7, 300, 5] * 14, list(range(30))]
    expected, found = (mixed_logits(each, ids, TensorParallelGroup()) for each in (published, own))
    assert torch.equal(found, expected)
    files = (own / "model.safetensors",)
    assert any(
        len(each.shape) == 3 and "experts" in name for name, each in read_headers(files).items()
    )
    headers = TensorHeaders.of_text_model(read_headers(files))
    stored = StoredTensors(files, own)
    assert {*headers} == {*stored}
    assert all(headers.shape(each) == stored.shape(each) for each in stored)
    checked = check_tensors(headers, None, decoder_tensors(ModelConfig.from_directory(own)))
    assert (checked.faults, checked.unused) == ((), "")


def test_views_are_parts_of_a_stack():
    shapes = {"a.experts.gate_up_proj": (2, 10, 8), "a.experts.down_proj": (2, 8, 5)}
    views = expert_views(shapes)
    assert len(views) == 6
    up = views["a.experts.1.up_proj.weight"]
    assert up == ExpertView("a.experts.gate_up_proj", 1, 5, (5, 8))
    assert up.window(slice(1, 3), slice(2, 4)) == (slice(1, 2), slice(6, 8), slice(2, 4))
    assert views["a.experts.0.down_proj.weight"].shape == (8, 5)


@pytest.mark.parametrize(
    "shapes",
    [
        {"a.experts.gate_up_proj": (2, 8, 10), "a.experts.down_proj": (2, 5, 8)},  # transposed
        {"a.experts.gate_up_proj": (2, 10, 8)},
        {"a.experts.down_proj": (2, 8, 5)},
        {"a.experts.up_proj": (2**40, 5, 8), "a.experts.down_proj": (2**40, 8, 5)},
        {"a.gate_up_proj": (2, 10, 8), "a.down_proj": (2, 8, 5)},
    ],
)
def test_other_tensors_stay_as_they_are(shapes):
    assert expert_views(shapes) == {}
