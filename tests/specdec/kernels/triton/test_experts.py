# Modules: specdec.kernels.reference.experts, specdec.kernels.triton.device.experts
# Modules: specdec.models.layers.expert_stack
"""Experts of all tokens at once: torch's routes and values, and bits of no batch."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from specdec.config.engine import ModelOptions
from specdec.kernels.reference import experts as reference
from specdec.kernels.reference.experts import ExpertStack, Routes, RoutingRule
from specdec.kernels.reference.packed_weight import CodeKind, quantize_weight
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.kernels.triton import experts
from specdec.kernels.triton.experts import FEW_ROWS, MANY_ROWS, TileSizes, num_tiles_of, plan_tiles
from specdec.models.layers.mixture import SparseMLP
from tests.specdec.engines import engine_config, local_engine, make_engine, request, tokens_by
from tests.specdec.models.families import save_family
from tests.specdec.models.passes import load
from tests.specdec.tiny import train_tokenizer
from tests.specdec.worker.device.runners import device_runner, device_target
from tests.specdec.worker.operators import Operators

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2}
HIDDEN, UNITS, NUM_EXPERTS, PER_TOKEN = 72, 40, 5, 2
PLAIN = RoutingRule(PER_TOKEN, normalizes=True)
RULES = {
    "softmax": PLAIN,
    "not normalized": RoutingRule(3, normalizes=False),
    "one": RoutingRule(1, normalizes=True),
    "DeepSeek-V2": RoutingRule(3, False, num_groups=4, num_chosen_groups=2, scale=1.5),
    "DeepSeek-V3": RoutingRule(4, True, True, num_groups=4, num_chosen_groups=2, scale=2.5),
}


def rows_of(num_rows, size=HIDDEN, seed=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, size, generator=generator).to(dtype)


def stack_of(*, has_bias=False, is_clamped=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)

    def make(*size):
        return (torch.randn(size, generator=generator) / size[-1] ** 0.5).to(dtype)

    return ExpertStack(
        make(NUM_EXPERTS, 2 * UNITS, HIDDEN),
        make(NUM_EXPERTS, HIDDEN, UNITS),
        make(NUM_EXPERTS, 2 * UNITS) if has_bias else None,
        make(NUM_EXPERTS, HIDDEN) if has_bias else None,
        is_clamped,
    )


def routes_of(num_rows, num_experts=NUM_EXPERTS, rule=PLAIN):
    return experts.route(rows_of(num_rows, num_experts, seed=3), None, rule)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_routes_are_those_of_torch(name, has_bias):
    rule, num_experts = RULES[name], 12 if "Deep" in name else NUM_EXPERTS
    logits = rows_of(9, num_experts)
    bias = rows_of(1, num_experts, seed=5)[0] if has_bias else None
    expected, found = (kind.route(logits, bias, rule) for kind in (reference, experts))
    assert found.chosen.tolist() == expected.chosen.tolist()
    torch.testing.assert_close(found.weights, expected.weights)
    plain = reference.route(logits, None, rule)
    assert has_bias == (plain.chosen.tolist() != found.chosen.tolist())


def test_of_equal_experts_the_first_is_chosen():
    found = experts.route(torch.zeros(2, 7), None, RoutingRule(3, normalizes=True))
    assert found.chosen.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("rule", [PLAIN, RULES["DeepSeek-V3"]], ids=["softmax", "groups"])
def test_logits_that_are_not_numbers_have_routes_to_experts(rule):
    found = experts.route(torch.full((2, 8), torch.nan), None, rule)
    assert 0 <= int(found.chosen.min()) <= int(found.chosen.max()) < 8
    assert found.weights.isnan().all()


@pytest.mark.parametrize("num_rows", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("num_pairs", [1, 3, 100, 1200])
@pytest.mark.parametrize("kind", ["mixed", "one", "elsewhere"])
def test_tiles_hold_each_pair_once(kind, num_pairs, num_rows):
    """The tiles are those of experts 2 to 6, in order; experts of other ranks have none."""
    chosen = torch.arange(num_pairs, dtype=torch.int32)[:, None] * 7 % 8
    chosen = chosen * 0 + {"one": 5, "elsewhere": 1}[kind] if kind != "mixed" else chosen
    plan = plan_tiles(chosen, 2, 5, num_rows)
    assert len(plan.tiles) == num_tiles_of(num_pairs, 5, num_rows)
    pairs = []
    for expert, first, end in plan.tiles.tolist():
        if expert >= 0:
            own = plan.order[first : min(end, first + num_rows)].tolist()
            assert len(own) > 0
            assert all(chosen[pair] == expert + 2 for pair in own)
            pairs += own
    own = [pair for pair in range(num_pairs) if 2 <= chosen[pair] < 7]
    assert pairs == sorted(own, key=lambda pair: int(chosen[pair]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "has_bias", "is_clamped", "has_base"),
    [(1, False, False, True), (9, True, True, False), (70, False, False, True)],
)
def test_results_are_those_of_torch(num_rows, has_bias, is_clamped, has_base, dtype):
    stack = stack_of(has_bias=has_bias, is_clamped=is_clamped, dtype=dtype)
    x, base = rows_of(num_rows, dtype=dtype), rows_of(num_rows, seed=4, dtype=dtype)
    given = (x, routes_of(num_rows), stack, 0, base if has_base else None)
    found, expected = experts.run_experts(*given), reference.run_experts(*given)
    assert found.dtype == dtype
    assert (found - expected).abs().max() < TOLERANCE[dtype]
    assert not torch.equal(found, base)
    sizes = TileSizes.of(2 * num_rows, NUM_EXPERTS, x.element_size(), invariant=False)
    assert sizes.rows == (MANY_ROWS if num_rows == 70 else FEW_ROWS)


def test_ranks_add_the_results_of_their_experts():
    x, routes, stack = rows_of(9), routes_of(9), stack_of(has_bias=True)
    whole, parts = experts.run_experts(x, routes, stack, 0), []
    for own in (slice(0, 2), slice(2, 5), slice(5, 5)):
        share = ExpertStack(
            *(each[own] for each in (stack.gate_up, stack.down)),
            *(each[own] for each in (stack.gate_up_bias, stack.down_bias)),
        )
        parts.append(experts.run_experts(x, routes, share, own.start))
    assert not parts[2].any()
    torch.testing.assert_close(sum(parts), whole)


def test_bits_of_a_row_do_not_depend_on_the_others():
    x, stack, routes = rows_of(37), stack_of(), routes_of(37)
    together = experts.run_experts(x, routes, stack, 0)
    for row in (0, 5, 36):
        own = slice(row, row + 1)
        alone = experts.run_experts(x[own], Routes(*(each[own] for each in routes)), stack, 0)
        assert torch.equal(alone[0], together[row])
    order = torch.randperm(37, generator=torch.Generator().manual_seed(3))
    shuffled = Routes(*(each[order].contiguous() for each in routes))
    assert torch.equal(experts.run_experts(x[order], shuffled, stack, 0), together[order])


def test_deterministic_tiles_have_one_height():
    many = TileSizes.of(2**16, NUM_EXPERTS, 2, invariant=True)
    assert many == TileSizes.of(2, NUM_EXPERTS, 2, invariant=False)


def test_no_row_and_no_expert_launch_nothing():
    stack = stack_of()
    assert experts.run_experts(rows_of(0), routes_of(1), stack, 0).shape == (0, HIDDEN)
    empty = replace(stack, gate_up=stack.gate_up[:0], down=stack.down[:0])
    base = rows_of(2, seed=4)
    assert torch.equal(experts.run_experts(rows_of(2), routes_of(2), empty, 0, base), base)


MIXTURES = [
    *("mixtral", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v2", "deepseek-v3"),
    *("glm4-moe", "dots1", "minimax-m2"),
]


@pytest.fixture(scope="module")
def family_dir(tmp_path_factory):
    """Return a function that writes a family once."""

    @cache
    def write(name):
        directory = tmp_path_factory.mktemp(name)
        save_family(directory, name)
        train_tokenizer(383).save_pretrained(directory)
        return directory

    return write


ASKED = [
    request("a", [11, 12, 13, 11, 12], max_tokens=3),
    request("b", [7, 9], seed=3, temperature=0.9, max_tokens=3),
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if each != "gpt-oss" else ()) for each in MIXTURES],
)
def test_a_model_on_kernels_has_the_tokens_of_torch(family_dir, name):
    """Steps with prompts and drafts run as graphs."""
    directory, config = family_dir(name), engine_config(2, max_num_seqs=2)
    expected = tokens_by(local_engine(directory, engine_config(0), kernels="torch"), ASKED)
    target = device_target(directory, config, kernels="triton")
    assert target._runner.model.fits_graphs
    assert tokens_by(make_engine(directory, config, target), ASKED) == expected


class Unconnected:
    """Collectives of a rank that runs alone."""

    def all_reduce(self, tensor):
        pass


@pytest.mark.parametrize("options", [ModelOptions(), ModelOptions(divides_by_expert=True)])
def test_ranks_have_parts_of_the_results_of_one(family_dir, options):
    """With a share of each expert, or whole experts, of which one rank has fewer."""

    def result_of(group, kernels="triton"):
        model = load(family_dir("deepseek-v3"), group, kernels=kernels, options=options)
        mixture = next(each for each in model.modules() if isinstance(each, SparseMLP))
        return mixture(rows_of(4, model.hidden_size), None)

    parts = [result_of(TensorParallelGroup(rank, 3, Unconnected())) for rank in range(3)]
    whole = result_of(TensorParallelGroup(), "torch")
    torch.testing.assert_close(sum(parts), whole, atol=1e-4, rtol=1e-4)


def test_a_mixture_is_six_launches_and_reads_nothing(family_dir, monkeypatch):
    """The router, and five kernels."""
    runner = device_runner(family_dir("qwen3-moe"), engine_config(0), kernels="triton")
    mixtures = [each for each in runner.model.modules() if isinstance(each, SparseMLP)]
    launched, call = [], GridExecutor.__call__

    def counted(self, *arguments, **options):
        launched.append(self.fn.__name__)
        return call(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    x = torch.randn(3, runner.model.hidden_size)
    with Operators() as operators:
        mixtures[0](x, x)
    assert launched == ["route", "plan_tiles", "hidden_units", "expert_results", "add_results"]
    reads = [name for name in operators.counts if "local_scalar" in name or "nonzero" in name]
    assert not reads
    products = [name for name in operators.counts if "mm" in name or "matmul" in name]
    assert sum(operators.counts[name] for name in products) == 1


@pytest.mark.parametrize(("kind", "group"), [(CodeKind.INT4, 16), (CodeKind.INT8, None)])
@pytest.mark.parametrize("num_rows", [1, 50])
def test_experts_in_few_bits_have_the_results_of_their_values(kind, group, num_rows):
    """With zero points, and groups smaller than what a program loads at once."""
    stack = stack_of(has_bias=True, is_clamped=True)
    packed = [
        quantize_weight(each.flatten(0, 1), kind, group) for each in (stack.gate_up, stack.down)
    ]
    if kind is CodeKind.INT4:
        zeros = torch.arange(packed[0].scales.numel()).view_as(packed[0].scales) % 16
        packed[0] = replace(packed[0], zeros=zeros.to(torch.uint8))
    stack = replace(stack, gate_up=packed[0], down=packed[1])
    assert (stack.num_experts, stack.units) == (NUM_EXPERTS, UNITS)
    x, routes = rows_of(num_rows), routes_of(num_rows)
    found, expected = (kind.run_experts(x, routes, stack, 0) for kind in (experts, reference))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    one = slice(num_rows - 1, num_rows)
    alone = experts.run_experts(x[one], Routes(*(each[one] for each in routes)), stack, 0)
    assert torch.equal(alone[0], found[-1])


def test_experts_that_are_quantized_fit_graphs(family_dir):
    """Their matrices become views of those that lie side by side, with the results of before."""
    load_quantized = partial(
        load, family_dir("qwen3-moe"), TensorParallelGroup(), quantization="int8", kernels="triton"
    )
    model = load_quantized()
    assert model.fits_graphs
    mixture = next(each for each in model.modules() if isinstance(each, SparseMLP))
    x = rows_of(4, model.hidden_size)
    found, mixture.stack = mixture(x, x), None
    torch.testing.assert_close(mixture(x, x), found, atol=1e-4, rtol=1e-4)
