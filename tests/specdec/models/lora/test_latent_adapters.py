# Modules: specdec.kernels.reference.lora, specdec.models.lora.grouped_adapters
"""Adapters of latent attention, whose expansion of latents is applied in two halves."""

import pytest
import torch

from specdec.config.engine import AdapterLimits
from specdec.kernels.reference.lora import add_updates
from specdec.models.config.extra_weights import adapter_bytes
from specdec.models.llama import CausalDecoder
from specdec.models.lora.grouped_adapters import GroupedAdapters
from specdec.models.lora.peft import AdapterFiles
from specdec.models.lora.updates import load_adapter
from tests.specdec.adapters import adapter_dir, merged_dir
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.lora.test_adapters import (
    KERNELS,
    NATIVE_ONLY,
    Passes,
    load_with,
    merged_logits,
    mixed,
    texts,
)

QUERIES = {"deepseek-v2": ("q_proj",), "deepseek-v3": ("q_a_proj", "q_b_proj")}
OTHERS = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # of the first layer


@pytest.fixture(scope="module", params=QUERIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model_dir(family, tmp_path_factory):
    directory = tmp_path_factory.mktemp(family)
    save_family(directory, family)
    return directory


@pytest.fixture(scope="module")
def adapters(family, model_dir, tmp_path_factory):
    """Return adapters of all projections, of the expansion alone, and of the others."""
    variants = [
        {"modules": (*QUERIES[family], *OTHERS, *MLP), "rank": 6},
        {"modules": ("kv_b_proj",), "rank": 5},
        {"modules": ("kv_b_proj",), "rank": 3, "layers": [1], "dtype": torch.bfloat16, "gain": 1},
        {"modules": (*QUERIES[family], "kv_a_proj_with_mqa"), "rank": 9},
    ]
    root = tmp_path_factory.mktemp("adapters")
    return [
        adapter_dir(root / str(index), model_dir, seed=index, **each)
        for index, each in enumerate(variants)
    ]


@pytest.fixture(scope="module")
def expected(model_dir, adapters, tmp_path_factory):
    """Return the logits of the model, then those with each adapter merged into its weights."""
    root, prompts = tmp_path_factory.mktemp("merged"), texts(len(adapters) + 1)
    merged = [merged_dir(root / each.name, model_dir, each) for each in adapters]
    pairs = zip([model_dir, *merged], prompts, strict=True)
    return [merged_logits(directory, prompt) for directory, prompt in pairs]


def check(found, expected):
    """Compare the logits of each adapter with those of merged weights."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kernels", "size"),
    [
        pytest.param(kernels, size, marks=() if size == quick else pytest.mark.slow)
        for kernels, quick in zip(KERNELS[::-1], (4, 1), strict=False)
        for size in (1, 2, 4)
    ],
)
def test_rows_of_a_batch_equal_their_adapters_merged(model_dir, adapters, expected, kernels, size):
    def logits(group):
        return mixed(load_with(model_dir, adapters, group, kernels=kernels), texts(5))

    ranks = run_ranks(size, logits)
    check([torch.cat(parts, dim=1) for parts in zip(*ranks, strict=True)], expected)


def test_each_adapter_changes_the_model(model_dir, adapters, expected):
    plain = [merged_logits(model_dir, prompt) for prompt in texts(len(adapters) + 1)]
    distances = [(a - b).abs().max() for a, b in zip(plain, expected, strict=True)]
    assert distances[0] == 0
    assert min(distances[1:]) > 0.05, "an adapter changes nothing, so no test can fail"


@NATIVE_ONLY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_has_the_bits_that_it_has_alone(model_dir, adapters, dtype):
    options = {"kernels": "native", "dtype": dtype}
    model, prompts = load_with(model_dir, adapters, **options), texts(5)
    together = mixed(model, prompts)
    for index, prompt in enumerate(prompts):
        assert torch.equal(Passes(model).run((index, prompt, index))[0], together[index])
    plain = load_with(model_dir, [], **options)
    assert torch.equal(Passes(plain).run((0, prompts[0], 0))[0], together[0])


def test_places_of_fixed_size_equal_merged_weights(model_dir, adapters, expected, monkeypatch):
    """As on a GPU, with torch in the place of its kernel."""

    def enable(model):
        limits = AdapterLimits(len(adapters), 9, len(adapters))
        sizes = model.layers, model.dtype, model.device, limits
        model._adapters = GroupedAdapters(*sizes, add_updates)
        return model._adapters

    monkeypatch.setattr(CausalDecoder, "enable_adapters", enable)
    model = load_with(model_dir, adapters, kernels="torch")
    check(mixed(model, texts(5)), expected)
    num_values = sum(each.downs.numel() + each.ups.numel() for each in model._adapters.stacks)
    planned = adapter_bytes(model.config, 16, "float32") * len(adapters)
    assert num_values * 4 <= planned
    model._adapters.drop(2)
    load_adapter(model._adapters, 9, AdapterFiles.read(adapters[-1], 64))  # in its place
    check(Passes(model).run((0, texts(5)[-1], 9)), expected[-1:])
