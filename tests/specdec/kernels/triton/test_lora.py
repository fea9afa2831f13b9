# Modules: specdec.kernels.triton.device.lora
"""Updates of rows with different adapters in one launch: torch's values, and bits of no batch."""

import pytest
import torch

from specdec.config.engine import AdapterLimits
from specdec.kernels.reference.lora import LoraStack, add_updates
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.kernels.triton import lora
from specdec.kernels.triton.lora import TritonLora, num_parts_of
from specdec.models.lora.grouped_adapters import GroupedAdapters
from specdec.models.lora.peft import AdapterFiles
from specdec.models.lora.updates import load_adapter as load_files
from specdec.worker import LocalTarget
from tests.specdec.adapters import ATTENTION, adapter_dir, merged_dir
from tests.specdec.engines import (
    engine_config,
    load_adapter,
    make_engine,
    request,
    tokens_by,
    with_adapter,
)
from tests.specdec.models.families import save_family
from tests.specdec.models.lora.test_adapters import Passes, merged_logits, texts
from tests.specdec.models.passes import load
from tests.specdec.worker.device.runners import device_runner, recorded_device_steps

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2}
COLUMNS = (range(70), range(70, 103), range(103, 136))
NUM_PLACES = 3


@pytest.fixture
def two_parts(monkeypatch):
    """Divide small inner dimensions; the second part is shorter."""
    monkeypatch.setattr(lora, "LEAST_UPDATE_PART", 40)
    assert num_parts_of(INNER) == 2


INNER = 90


def stack_of(rank=16, columns=COLUMNS, inner=INNER, dtype=torch.float32):
    """Return random updates; each place has another rank, after which are zeros."""
    generator = torch.Generator().manual_seed(1)
    device = torch.device("cpu")
    stack = LoraStack.empty(NUM_PLACES, rank, inner, columns, dtype, device)
    for place, own in enumerate((rank, rank // 2, 3)):
        for projection in range(len(columns)):
            down = torch.randn(own, inner, generator=generator) / inner**0.5
            stack.downs[place, projection * rank : projection * rank + own] = down.to(dtype)
        up = torch.randn(own, stack.ups.shape[2], generator=generator) / own**0.5
        stack.ups[place, :own] = up.to(dtype)
    return stack


def rows_of(num_rows, size=136, inner=INNER, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    y, x = (torch.randn(num_rows, n, generator=generator).to(dtype) for n in (size, inner))
    return y, x


def updated(y, x, places, stack):
    add, result = TritonLora(torch.device("cpu")), y.clone()
    add.prepare(stack)
    add(result, x, places, stack)
    return result


def mixed(num_rows):
    """Return places that change within every tile, 0 among them."""
    return torch.arange(num_rows, dtype=torch.int32) * 7 % (NUM_PLACES + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_updates_are_those_of_torch(two_parts, num_rows, dtype):
    y, x = rows_of(num_rows, dtype=dtype)
    stack, places = stack_of(dtype=dtype), mixed(num_rows) + (num_rows == 1)
    expected = y.clone()
    add_updates(expected, x, places, stack)
    found = updated(y, x, places, stack)
    assert found.dtype == dtype
    assert (found - expected).abs().max() < TOLERANCE[dtype]
    assert not torch.equal(found, y)


@pytest.mark.parametrize("rank", [32, 128])
def test_larger_ranks(rank):
    """Those above a tile are added up tile by tile."""
    y, x = rows_of(5, size=40)
    stack = stack_of(rank, columns=(range(40),))
    expected = y.clone()
    add_updates(expected, x, mixed(5), stack)
    assert (updated(y, x, mixed(5), stack) - expected).abs().max() < TOLERANCE[torch.float32]


def test_bits_of_a_row_do_not_depend_on_the_others(two_parts):
    y, x = rows_of(37)
    stack, places = stack_of(), mixed(37)
    together = updated(y, x, places, stack)
    for row in (1, 2, 3, 18, 36):
        own = slice(row, row + 1)
        assert torch.equal(updated(y[own], x[own], places[own], stack)[0], together[row])
    order = torch.randperm(37, generator=torch.Generator().manual_seed(3))
    assert torch.equal(updated(y[order], x[order], places[order], stack), together[order])


def test_rows_without_an_adapter_keep_their_bits():
    y, x = rows_of(20)
    places = mixed(20)
    found = updated(y, x, places, stack_of())
    assert torch.equal(found[places == 0], y[places == 0])
    assert not (found[places > 0] == y[places > 0]).all(1).any()
    assert torch.equal(updated(y, x, torch.zeros_like(places), stack_of()), y)


def test_strided_inputs_and_results_in_float32():
    y, x = rows_of(6, dtype=torch.float16)
    wide = torch.cat([x, x], 1)[:, :INNER]
    stack = stack_of(dtype=torch.float16)
    found = updated(y.float(), wide, mixed(6), stack)
    assert torch.equal(found, updated(y.float(), x, mixed(6), stack))
    assert not torch.equal(found, found.half().float())


def test_empty_batches_and_shards_launch_nothing():
    y, x = rows_of(0)
    assert updated(y, x, mixed(0), stack_of()).shape == (0, 136)
    y, x = rows_of(2, size=0)
    assert updated(y, x, mixed(2), stack_of(columns=(range(0),))).shape == (2, 0)


def test_parts_follow_from_the_matrix_alone():
    assert [num_parts_of(inner) for inner in (64, 576, 4096, 14_336)] == [1, 2, 16, 16]


LIMITS = AdapterLimits(max_loras=3, max_rank=8, max_loaded=2)


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    variants = {"a": {}, "b": {"rank": 8, "modules": ATTENTION}}
    return {
        name: adapter_dir(root / name, tiny_model_dir, seed=seed, **variant)
        for seed, (name, variant) in enumerate(variants.items())
    }


@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_model_on_kernels_has_the_tokens_of_torch(
    tiny_model_dir, adapters, monkeypatch, is_alone
):
    """Steps of a request without an adapter and two with one; none goes to the host."""
    begun = recorded_device_steps(monkeypatch)

    def tokens(kernels):
        config = engine_config(2, adapters=LIMITS)
        runner = device_runner(tiny_model_dir, config, kernels=kernels)
        engine = make_engine(tiny_model_dir, config, LocalTarget(runner))
        for name, path in adapters.items():
            load_adapter(engine, name, path)
        given = [
            with_adapter(engine, request(name or "base", [11, 12, 13, 11, 12], max_tokens=4), name)
            for name in (("a",) if is_alone else ("", "a", "b"))
        ]
        return tokens_by(engine, given), runner.model

    expected, _ = tokens("torch")
    assert not any(row.adapter_id for rows in begun for row in rows)
    found, model = tokens("triton")
    assert isinstance(model._adapters, GroupedAdapters)
    assert found == expected
    assert any(row.adapter_id for rows in begun for row in rows)


@pytest.mark.slow
def test_adapters_of_latent_attention_equal_merged_weights(tmp_path):
    """The matrices of its heads have a place for each head of an adapter."""
    model_dir, adapter, merged = (tmp_path / name for name in ("model", "adapter", "merged"))
    save_family(model_dir, "deepseek-v3")
    modules = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "self_attn.o_proj")
    adapter_dir(adapter, model_dir, rank=5, modules=modules, gain=1)
    merged_dir(merged, model_dir, adapter)
    (prompt,) = texts(1, length=7)
    model = load(model_dir, TensorParallelGroup(), kernels="torch")
    expected = Passes(model).run((0, prompt, 0))[0], merged_logits(merged, prompt)
    add = TritonLora(model.device)
    adapters = GroupedAdapters(model.layers, model.dtype, model.device, LIMITS, add)
    for stack in adapters.stacks:
        add.prepare(stack)
    model._adapters = adapters
    load_files(adapters, 1, AdapterFiles.read(adapter, 64))
    found = Passes(model).run((0, prompt, 0), (1, prompt, 1))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (found[1] - found[0]).abs().max() > 0.1
