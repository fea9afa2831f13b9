"""Passes of models with recurrent layers and adapters, also of replayed drafts."""

import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import linear_layers
from specdec.models.config.extra_weights import adapter_bytes
from specdec.models.config.families.native_recurrence import recurrence_fault
from specdec.models.config.model_config import ModelConfig
from specdec.models.cpu_decoder import NativeHybridDecoder
from specdec.models.lora.peft import AdapterFiles
from specdec.models.lora.updates import AdapterReader, load_adapter
from specdec.types.errors import UnsupportedModelError
from tests.specdec.adapters import adapter_dir, merged_dir, rewrite
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.hybrid_families import HYBRIDS
from tests.specdec.models.lora.test_adapters import (
    KERNELS,
    NATIVE_ONLY,
    Passes,
    load_with,
    merged_logits,
    texts,
)
from tests.specdec.models.passes import load, weights_of

QUICK = ("lfm2", "qwen3-next", "jamba")
FAMILIES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS
]
LENGTH = 24


def modules_of(model_dir):
    """Return the ends of the names of all layers that adapters may update."""
    names = linear_layers(ModelConfig.from_directory(model_dir))
    return tuple(name.removeprefix("model.") for name in names)


@pytest.fixture(scope="module", params=FAMILIES)
def parts(request, tmp_path_factory):
    """Return a model, two adapters, and the logits of a text without and with each merged."""
    root = tmp_path_factory.mktemp(request.param)
    model_dir = root / "model"
    save_family(model_dir, request.param)
    modules = modules_of(model_dir)
    variants = ({"rank": 6}, {"rank": 3, "layers": range(0, 9, 2)})
    adapters = [
        adapter_dir(root / f"a{seed}", model_dir, modules=modules, gain=0.15, seed=seed, **each)
        for seed, each in enumerate(variants)
    ]
    merged = [merged_dir(root / f"m{each.name}", model_dir, each) for each in adapters]
    prompts = texts(3, LENGTH)
    logits = [
        merged_logits(directory, prompt)
        for directory, prompt in zip((model_dir, *merged), prompts, strict=True)
    ]
    assert all((logits[0] - each).abs().max() > 0.05 for each in logits[1:])
    return model_dir, adapters, logits


def with_drafts(model, prompts, ids):
    """Run sequences, each with an adapter, of whose drafts some are accepted; return logits."""
    passes, pieces = Passes(model), {index: [] for index in range(len(prompts))}
    at = 0
    for known, right, wrong in ((9, 0, 0), (1, 2, 2), (2, 0, 3), (1, 3, 0), (6, 0, 0)):
        end = at + known + right
        rows = [(i, [*text[at:end], *[7] * wrong], ids[i]) for i, text in enumerate(prompts)]
        found = passes.run(*rows, num_guesses=right + wrong, num_accepted=right)
        for index, logits in enumerate(found):
            pieces[index].append(logits[: end - at])
        at = end
    assert at == LENGTH
    return [torch.cat(each) for each in pieces.values()]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_a_batch_equal_their_adapters_merged(parts, kernels, size):
    model_dir, adapters, expected = parts

    def logits(group):
        model = load_with(model_dir, adapters, group, kernels=kernels_of(model_dir, kernels))
        return with_drafts(model, texts(3, LENGTH), (0, 1, 2))

    ranks = run_ranks(size, logits)
    for ours, theirs in zip(zip(*ranks, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(ours, dim=1), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
def test_three_ranks_do_too(parts, kernels):
    test_rows_of_a_batch_equal_their_adapters_merged(parts, kernels, 3)


def kernels_of(model_dir, kernels):
    """Return native kernels only for a model that has them."""
    fault = recurrence_fault(ModelConfig.from_directory(model_dir).recurrent)
    return kernels if fault is None else "torch"


@NATIVE_ONLY
@pytest.mark.parametrize("how", [{}, {"dtype": torch.bfloat16}, {"quantization": "int8"}])
def test_native_rows_have_the_bits_that_they_have_alone(parts, how):
    model_dir, adapters, _ = parts
    model = load_with(model_dir, adapters, **how)
    if not isinstance(model, NativeHybridDecoder):
        pytest.skip("torch runs it")
    prompts = texts(3, LENGTH)
    together = with_drafts(model, prompts, (0, 1, 2))
    for adapter_id, prompt in enumerate(prompts):
        [drafted] = with_drafts(model, [prompt], (adapter_id,))
        assert torch.equal(drafted, together[adapter_id])
        alone = Passes(model).run((0, prompt, adapter_id))[0]
        assert torch.equal(alone, together[adapter_id])


def test_the_plan_reserves_what_an_adapter_takes(parts):
    model_dir, adapters, _ = parts
    config, files = ModelConfig.from_directory(model_dir), AdapterFiles.read(adapters[0], 8)

    def num_values(group):
        reader = AdapterReader(files, torch.float32)
        linears = weights_of(load(model_dir, group)).enable_adapters().linears
        updates = [update for each in linears if (update := reader.update_of(each)) is not None]
        return sum(
            each.shrink.numel() + sum(part.weight.numel() for part in each.expansions)
            for each in updates
        )

    for size in (1, 3):
        found = 4 * sum(run_ranks(size, num_values))
        reserved = adapter_bytes(config, 6, "float32", size)
        assert found <= reserved <= 2.5 * found


def test_names_of_published_files_and_of_modules(tmp_path):
    """Adapters of Kimi Linear have the names of its modules, or of its files."""
    save_family(tmp_path / "model", "kimi-linear")
    group = TensorParallelGroup()
    for name in ("f_a_proj", "forget_gate.f_a_proj"):
        adapter = adapter_dir(tmp_path / name, tmp_path / "model", modules=("f_a_proj",))
        rewrite(adapter, lambda tensors, name=name: renamed(tensors, name))
        rewrite(adapter, target_modules=[name])
        store = load(tmp_path / "model", group).enable_adapters()
        load_adapter(store, 1, AdapterFiles.read(adapter, 8))
    rewrite(adapter, lambda tensors: tensors | renamed(tensors, "f_a_proj"), target_modules=None)
    with pytest.raises(UnsupportedModelError, match=r"self_attn.f_a_proj has two names"):
        AdapterFiles.read(adapter, 8)


def renamed(tensors, name):
    return {
        key.replace("forget_gate.", "").replace("f_a_proj", name): each.clone()
        for key, each in tensors.items()
    }


@pytest.mark.parametrize(
    ("module", "shapes", "limit"),
    [
        ("linear_attn.conv1d", ((4, 90, 4), (123, 4, 1)), "has shape [4, 90, 4], not a matrix's"),
        ("mlp.shared_expert.up_proj", ((4, 90), (31, 4)), "up_proj is not a linear layer of"),
        ("mlp.gate", ((4, 90), (6, 4)), "mlp.gate is not a linear layer of"),
    ],
)
def test_modules_that_cannot_have_an_adapter_are_refused_by_name(tmp_path, module, shapes, limit):
    save_family(tmp_path / "model", "qwen3-next")
    adapter = adapter_dir(tmp_path / "a", tmp_path / "model", modules=("o_proj",))
    names = [f"base_model.model.model.layers.0.{module}.lora_{side}.weight" for side in "AB"]
    tensors = dict(zip(names, map(torch.ones, shapes), strict=True))
    rewrite(adapter, lambda old: old | tensors, target_modules=None)
    store = load(tmp_path / "model", TensorParallelGroup()).enable_adapters()
    with pytest.raises(UnsupportedModelError) as refused:
        load_adapter(store, 1, AdapterFiles.read(adapter, 8))
    assert module in str(refused.value)
    assert limit in str(refused.value)
