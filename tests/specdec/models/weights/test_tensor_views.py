"""Tensors that are parts of stored ones, or several of them, are the same model."""

import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import decoder_tensors
from specdec.models.config.model_config import ModelConfig
from specdec.models.weights.checks import check_tensors
from specdec.models.weights.stored_tensors import StoredTensors
from specdec.models.weights.tensor_headers import TensorHeader, text_model_headers
from specdec.models.weights.tensor_views import ExpertView, JoinedView, tensor_views
from specdec.models.weights.weight_files import read_headers
from tests.specdec.models.families import reference_model, save_family
from tests.specdec.models.passes import mixed_logits

FAMILIES = [
    "granite-4-moe",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5-moe", "nemotron-h")),
    pytest.param("olmo-hybrid", marks=pytest.mark.slow),
]
"""Families of which published files and those of transformers have other tensors."""


@pytest.mark.parametrize("name", FAMILIES)
def test_both_layouts_are_the_same_model(tmp_path, name):
    published, own = tmp_path / "published", tmp_path / "own"
    save_family(published, name)
    reference_model(published).save_pretrained(own, save_original_format=False)
    ids = [[7, 300, 5] * 14, list(range(30))]
    expected, found = (mixed_logits(each, ids, TensorParallelGroup()) for each in (published, own))
    assert torch.equal(found, expected)
    files = (own / "model.safetensors",)
    assert {*read_headers(files)} != {*read_headers((published / files[0].name,))}
    headers = text_model_headers(read_headers(files))
    stored = StoredTensors(files, own)
    assert {*headers} == {*stored}
    assert all(headers.shape(each) == stored.shape(each) for each in stored)
    expected = decoder_tensors(ModelConfig.from_directory(own), headers)
    checked = check_tensors(headers, None, expected)
    assert (checked.faults, checked.unused) == ((), "")


def test_views_are_parts_of_a_stack():
    shapes = {"a.experts.gate_up_proj": (2, 10, 8), "a.experts.down_proj": (2, 8, 5)}
    views = tensor_views(shapes)
    assert len(views) == 6
    up = views["a.experts.1.up_proj.weight"]
    assert up == ExpertView(("a.experts.gate_up_proj",), 1, 5, (5, 8))
    window = up.part(slice(1, 3), slice(2, 4)).window
    assert window == (slice(1, 2), slice(6, 8), slice(2, 4))
    assert views["a.experts.0.down_proj.weight"].shape == (8, 5)


def test_convolutions_are_joined():
    sizes = {"q": 3, "k": 3, "v": 6}
    [(name, view)] = tensor_views(
        {f"a.{part}_conv1d.weight": (size, 1, 4) for part, size in sizes.items()}
    ).items()
    assert (name, view.shape) == ("a.conv1d.weight", (12, 1, 4))
    assert isinstance(view, JoinedView)
    parts = [(part.stored[2], *part.window) for part in view.parts(slice(2, 7))]
    assert parts == [("q", slice(2, 3)), ("k", slice(0, 3)), ("v", slice(0, 1))]


def test_codes_of_experts_in_one_tensor_are_refused():
    shapes = {"a.experts.gate_up_proj": (2, 10, 8), "a.experts.down_proj": (2, 8, 5)}
    headers = {name: TensorHeader("F8_E4M3", shape) for name, shape in shapes.items()}
    found = check_tensors(text_model_headers(headers), None, {"a.experts.1.up_proj.weight": (5, 8)})
    assert "a.experts.1.up_proj.weight has codes of type F8_E4M3" in found.faults[0]


def test_stacks_may_be_transposed():
    shapes = {"a.experts.gate_up_proj": (2, 8, 10), "a.experts.down_proj": (2, 5, 8)}
    up = tensor_views(shapes)["a.experts.1.up_proj.weight"]
    assert up == ExpertView(("a.experts.gate_up_proj",), 1, 5, (5, 8), is_transposed=True)
    assert up.part(slice(1, 3), slice(2, 4)).window == (slice(1, 2), slice(2, 4), slice(6, 8))


@pytest.mark.parametrize(
    "shapes",
    [
        {
            **{"a.experts.gate_up_proj": (2, 8, 10), "a.experts.down_proj": (2, 5, 8)},
            "a.experts.down_proj_bias": (2, 8),  # GPT-OSS
        },
        {"a.experts.gate_up_proj": (2, 10, 8)},
        {"a.experts.up_proj": (5, 8), "a.experts.down_proj": (2, 8, 5)},
        {"a.experts.down_proj": (2, 8, 5)},
        {"a.experts.up_proj": (2**40, 5, 8), "a.experts.down_proj": (2**40, 8, 5)},
        {"a.gate_up_proj": (2, 10, 8), "a.down_proj": (2, 8, 5)},
        {"a.q_conv1d.weight": (3, 1, 4), "a.k_conv1d.weight": (3, 1, 4)},
        {f"a.{part}_conv1d.weight": (3, 1, 3 + (part == "v")) for part in "qkv"},
    ],
)
def test_other_tensors_stay_as_they_are(shapes):
    assert tensor_views(shapes) == {}
