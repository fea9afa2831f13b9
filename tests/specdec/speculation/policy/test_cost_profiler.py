# Modules: specdec.types.trial_sequences
"""Tests of the cost profiler on runners of the tiny model and on fakes with known times."""

import time
from collections import Counter
from itertools import product

import pytest

from specdec.config.engine import DraftLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.policy.cost_profiler import (
    CostProfiler,
    TargetCosts,
    with_drafting,
    with_engine,
)
from specdec.speculation.policy.cost_table import CostTable
from specdec.types.drafts.draft_tree import num_growth_slots
from specdec.types.messages import VerifyOutput
from specdec.worker import LocalDraftWorker, LocalTarget, RankModel, load_draft, load_target
from tests.clock import Clock
from tests.specdec.engines import engine_config, make_engine, request, run


class TimedTarget:
    """A target whose step takes 10 ms, and 1 ms for each row."""

    def __init__(self, clock):
        self.clock = clock
        self.known = set()
        self.rows = []

    def begin(self, step):
        self.known -= set(step.released)
        self.known |= {each.seq_id for each in step.admitted}
        assert {row.seq_id for row in step.rows} <= self.known
        self.rows.append(sum(len(row.token_ids) for row in step.rows))

    def collect(self):
        self.clock.now_s += 0.01 + 0.001 * self.rows[-1]
        return VerifyOutput(0, ())


def test_the_table_holds_the_measured_times():
    clock = Clock()
    target = TimedTarget(clock)
    config = engine_config(max_num_seqs=8, max_num_batched_tokens=64)
    table = CostProfiler(config, 4, clock).verification(target, budget_s=100).steps
    assert (table.batch_sizes, table.draft_tokens) == ((1, 4, 8), (0, 1, 2, 4))
    for size in table.batch_sizes:
        for count in table.draft_tokens:
            expected_s = 0.01 + 0.001 * size * (1 + count)
            assert table.step_s(size, count) == pytest.approx(expected_s)
    assert target.known == set(), "sequences were left"


def test_tokens_of_a_step_differ_as_those_of_text():
    """Equal ones would be routed to the same experts of a mixture."""
    steps = []

    class Recorder(TimedTarget):
        def begin(self, step):
            super().begin(step)
            steps.append([token for row in step.rows for token in row.token_ids])

    clock = Clock()
    config = engine_config(max_num_seqs=8, max_num_batched_tokens=64)
    CostProfiler(config, 4, clock).verification(Recorder(clock), budget_s=100)
    largest = max(steps, key=len)
    assert len(largest) == 40
    assert len(set(largest)) > 30


TEXT = tuple(range(100, 600))


def test_sequences_of_a_mixture_continue_a_text_with_its_kv():
    rows = []

    class TargetOfText(TimedTarget):
        def begin(self, step):
            super().begin(step)
            rows.extend(step.rows)

    clock = Clock()
    config = engine_config(max_num_seqs=8, max_num_batched_tokens=64)
    profiler = CostProfiler(config, 4, clock, text=TEXT)
    table = profiler.verification(TargetOfText(clock), budget_s=100).steps
    assert table.batch_sizes == (1, 2, 4, 8)
    contexts, verified = rows[:8], rows[8:]
    for seq_id, row in enumerate(contexts):
        assert (row.seq_id, row.num_computed_tokens, row.samples) == (seq_id, 0, False)
        assert row.token_ids == tuple(range(100 + 37 * seq_id, 164 + 37 * seq_id))
    for row in verified:
        first = 164 + 37 * row.seq_id
        assert row.token_ids == tuple(range(first, first + 1 + row.num_draft_tokens))
    assert {row.num_draft_tokens for row in verified} == {0, 1, 2, 4}


def test_many_sequences_of_a_mixture_share_contexts():
    """The KV of sixteen is computed, in whose blocks the others are."""
    tables, contexts = {}, []

    class TargetOfText(TimedTarget):
        def begin(self, step):
            super().begin(step)
            tables.update((each.seq_id, each.block_ids) for each in step.block_table_deltas)
            contexts.extend(row.seq_id for row in step.rows if not row.samples)

    clock = Clock()
    config = engine_config(max_num_seqs=40, max_num_batched_tokens=128, num_blocks=2000)
    CostProfiler(config, 1, clock, text=TEXT).verification(TargetOfText(clock), budget_s=0.5)
    assert contexts == list(range(16))
    assert {frozenset(tables[seq_id]) for seq_id in range(16)} == {
        frozenset(each) for each in tables.values()
    }


CHOICES = tuple((0,) * depth for depth in (1, 2, 3)) + tuple((rank,) for rank in range(1, 10))


def test_a_head_drafts_in_the_steps_with_drafts():
    """Its seconds are in the target's step, so that they are part of the cost of a draft."""
    clock, costs = Clock(), []

    class TargetWithHead(TimedTarget):
        def begin(self, step):
            super().begin(step)
            costs.append([(row.num_draft_tokens, row.drafting.num_next) for row in step.rows])
            clock.now_s += 0.1 * sum(row.drafting.num_next for row in step.rows)

    config = engine_config(max_num_seqs=1, max_num_batched_tokens=64)
    profiler = CostProfiler(config, 4, clock, with_head=True)
    table = profiler.verification(TargetWithHead(clock), 100).steps
    admission, *catch_up = costs[:3]
    assert admission == []
    assert catch_up == [[(0, 1)]] * 2, "a head with KV first computes that of the context"
    assert {row for each in costs[3:] for row in each} == {(0, 0), (1, 1), (2, 2), (4, 4)}
    assert table.step_s(1, 4) == pytest.approx(0.01 + 0.005 + 0.4)


@pytest.mark.parametrize(
    ("method", "keys", "most", "smaller"),
    [
        pytest.param("eagle3", {}, 12, {7}, id="trees of two sizes"),
        pytest.param("medusa", {"medusa_choices": CHOICES}, 12, set(), id="of one shape"),
        pytest.param("eagle3", {"adaptive_length": True}, 25, {7, 12}, id="and longer chains"),
    ],
)
def test_a_head_drafts_trees_of_more_tokens_than_the_longest_chain(method, keys, most, smaller):
    clock, rows = Clock(), set()

    class TargetWithHead(TimedTarget):
        def begin(self, step):
            super().begin(step)
            rows.update((row.drafting.num_next, row.drafting.next_depth) for row in step.rows)

    keys = {"model": "head", "num_draft_tree_tokens": 12, **keys}
    speculation = SpeculativeConfig.of(method, 3, **keys)
    config = engine_config(max_num_seqs=1, max_num_batched_tokens=64, speculation=speculation)
    profiler = CostProfiler(config, most, clock, with_head=True)
    table = profiler.verification(TargetWithHead(clock), budget_s=100).steps
    grown = sorted({*smaller, most})
    assert table.draft_tokens == (0, 1, 3, *grown)
    assert rows == {(0, 0), (1, 0), (3, 0), *((count, 3) for count in grown)}


@pytest.mark.parametrize(("num_nodes", "depth"), [(12, 11), (13, 6), (16, 5), (64, 8), (5, 4)])
@pytest.mark.parametrize("max_model_len", [160, 40])
def test_block_tables_have_the_slots_that_a_head_writes(num_nodes, depth, max_model_len):
    """A tree may run more nodes than it keeps, after drafts that were all accepted."""
    clock, needed, held = Clock(), [], []

    class TargetWithHead(TimedTarget):
        def begin(self, step):
            super().begin(step)
            held.extend(4 * len(each.block_ids) for each in step.block_table_deltas)
            for row in step.rows:
                count, own_depth = row.drafting.num_next, row.drafting.next_depth
                grown = num_growth_slots(count, own_depth) if own_depth else count
                needed.append(row.end + 1 + grown)

    keys = {"model": "head", "num_draft_tree_tokens": num_nodes}
    speculation = SpeculativeConfig.of("eagle", depth, **keys)
    config = engine_config(
        max_num_seqs=1,
        max_num_batched_tokens=128,
        max_model_len=max_model_len,
        speculation=speculation,
    )
    profiler = CostProfiler(config, num_nodes, clock, with_head=True)
    profiler.verification(TargetWithHead(clock), budget_s=100)
    assert max(needed) <= min(held)
    assert max(needed) <= max_model_len or num_nodes == 64 > max_model_len


def test_profiling_respects_its_budget_and_extrapolates_the_rest_by_rows():
    clock = Clock()
    target = TimedTarget(clock)
    config = engine_config(max_num_seqs=8, max_num_batched_tokens=64)
    start_s = clock.now_s
    table = CostProfiler(config, 4, clock).verification(target, budget_s=0.03).steps
    assert clock.now_s - start_s < 0.1
    assert table.step_s(8, 4) > table.step_s(1, 0)


@pytest.mark.parametrize(("least_s", "most_rows"), [(0.04, 128), (1.0, 640)])
def test_steps_that_cost_by_their_rows_are_extrapolated(least_s, most_rows):
    """Weights are read for 40 rows, or for all, in the time in which the arithmetic is done."""

    class Roofline(TimedTarget):
        def collect(self):
            self.clock.now_s += max(least_s, 0.001 * self.rows[-1])
            return VerifyOutput(0, ())

    clock = Clock()
    target = Roofline(clock)
    config = engine_config(max_num_seqs=128, max_num_batched_tokens=1024)
    table = CostProfiler(config, 4, clock).verification(target, budget_s=100).steps
    assert max(target.rows) == most_rows
    for size, count in ((1, 4), (64, 0), (128, 4)):
        assert table.step_s(size, count) == pytest.approx(max(least_s, 0.001 * size * (1 + count)))


@pytest.mark.parametrize(("budget_s", "counts"), [(1.6, [4] * 4), (0.3, [4, 3, 2, 2])])
def test_the_cheapest_steps_are_measured_in_each_round(budget_s, counts):
    """Other load during some of their measurements does not count then."""
    clock = Clock()
    target = TimedTarget(clock)
    config = engine_config(max_num_seqs=2, max_num_batched_tokens=64)
    CostProfiler(config, 2, clock).verification(target, budget_s)
    measured = Counter(target.rows[1:-1])  # without the admission and the release
    assert [measured[rows] for rows in (1, 3, 4, 6)] == counts


def test_other_load_during_one_measurement_does_not_count():
    clock = Clock()

    class Disturbed(TimedTarget):
        def collect(self):
            self.clock.now_s += 0.5 * (len(self.rows) in {2, 5, 9})
            return super().collect()

    config = engine_config(max_num_seqs=2, max_num_batched_tokens=64)
    table = CostProfiler(config, 1, clock).verification(Disturbed(clock), budget_s=100).steps
    for size, count in product((1, 2), (0, 1)):
        assert table.step_s(size, count) == pytest.approx(0.01 + 0.001 * size * (1 + count))


def test_shapes_over_max_num_batched_tokens_are_not_run():
    clock = Clock()
    target = TimedTarget(clock)
    config = engine_config(max_num_batched_tokens=16)
    CostProfiler(config, 4, clock).verification(target, 100)
    assert max(target.rows) <= 16


def test_drafting_costs_are_added_to_shapes_with_drafts():
    verification = CostTable((1, 2), (0, 1), ((1.0, 2.0), (3.0, 4.0)))
    drafting = CostTable((1, 2), (1,), ((0.5,), (0.75,)))
    assert with_drafting(verification, drafting).seconds == ((1.0, 2.5), (3.0, 4.75))


def test_the_hosts_part_is_serial_unless_steps_are_begun_ahead():
    steps = CostTable((1, 2), (0, 1), ((1.0, 2.0), (3.0, 4.0)))
    begin = CostTable((1, 2), (0, 1), ((0.5, 0.5), (0.5, 1.5)))
    engine = CostTable((1, 2), (0, 1), ((0.25, 0.5), (4.5, 5.0)))
    target = TargetCosts(steps, begin)
    assert with_engine(target, engine, overlaps=False).seconds == ((1.25, 2.5), (7.5, 9.0))
    assert with_engine(target, engine, overlaps=True).seconds == ((0.75, 2.5), (5.0, 9.0))
    held = with_engine(target, engine, overlaps=True, num_held_drafts=1)
    assert held.seconds == ((0.75, 1.5), (5.0, 6.5))


def test_the_seconds_of_begin_are_measured_too():
    class Packing(TimedTarget):
        def begin(self, step):
            super().begin(step)
            self.clock.now_s += 0.002 * len(step.rows)

    clock = Clock()
    config = engine_config(max_num_seqs=4, max_num_batched_tokens=64)
    costs = CostProfiler(config, 2, clock).verification(Packing(clock), budget_s=100)
    assert costs.begin.step_s(4, 2) == pytest.approx(0.008)
    assert costs.steps.step_s(4, 2) == pytest.approx(0.01 + 0.012 + 0.008)


def test_profiling_leaves_no_state_in_a_real_model(tiny_model_dir):
    config, group = engine_config(3), TensorParallelGroup()
    target = LocalTarget(load_target(RankModel(tiny_model_dir, "float32", config), group))
    CostProfiler(config, 3, time.perf_counter).verification(target, 0.2)
    fresh = LocalTarget(load_target(RankModel(tiny_model_dir, "float32", config), group))
    requests = [request(f"r{i}", [11, 12, 13 + i, 11, 12], seed=i) for i in range(3)]
    generated = run(make_engine(tiny_model_dir, config, target), requests)
    expected = run(make_engine(tiny_model_dir, config, fresh), requests)
    assert {name: each.token_ids for name, each in generated.items()} == {
        name: each.token_ids for name, each in expected.items()
    }


@pytest.mark.parametrize("text", [(), tuple(range(20, 300))])
def test_a_real_draft_model_is_measured(tiny_model_dir, text):
    limits = DraftLimits(num_blocks=40, block_size=4, max_model_len=160, max_catch_up_tokens=16)
    runner = load_draft(RankModel(tiny_model_dir, "float32", limits), TensorParallelGroup())
    worker = LocalDraftWorker(runner)
    profiler = CostProfiler(engine_config(3), 3, time.perf_counter, draft_text=text)
    table = profiler.drafting(worker, limits, 0.2)
    assert table.draft_tokens == (1, 3)
    assert table.step_s(1, 3) > 0


@pytest.mark.parametrize(("max_model_len", "longest"), [(66, 8), (16, 8), (8, 6), (3, 1), (2, 1)])
def test_no_measured_draft_exceeds_the_length_of_the_draft_model(
    tiny_model_dir, max_model_len, longest
):
    directory = tiny_model_dir
    limits = DraftLimits(40, block_size=4, max_model_len=max_model_len, max_catch_up_tokens=16)
    runner = load_draft(RankModel(directory, "float32", limits), TensorParallelGroup())
    profiler = CostProfiler(engine_config(8), 8, time.perf_counter)
    table = profiler.drafting(LocalDraftWorker(runner), limits, 0.1)
    assert table.draft_tokens[-1] == longest


def test_sequences_of_a_mixture_that_drafts_continue_a_text_with_its_kv():
    """In its own vocabulary, in chunks that it may catch up on."""
    chunks, drafted = [], []

    class DraftWorkerOfText:
        def begin(self, step):
            chunks.append([row for row in step.rows if row.token_ids])
            drafted.extend(step.drafts)

        def collect(self):
            return None

    config = engine_config(max_num_seqs=8, max_num_batched_tokens=512)
    limits = DraftLimits(num_blocks=400, block_size=4, max_model_len=160, max_catch_up_tokens=128)
    profiler = CostProfiler(config, 4, time.perf_counter, text=(1,), draft_text=TEXT)
    table = profiler.drafting(DraftWorkerOfText(), limits, budget_s=100)
    assert table.batch_sizes == (1, 2, 4, 8)
    contexts = [chunk for chunk in chunks if chunk]
    assert [[row.seq_id for row in chunk] for chunk in contexts] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for row in (each for chunk in contexts for each in chunk):
        first = 100 + 37 * row.seq_id
        assert (row.num_computed_tokens, row.samples) == (0, False)
        assert row.token_ids == tuple(range(first, first + 64))
    for row in drafted:
        assert (row.num_computed_tokens, row.token_ids) == (64, (164 + 37 * row.seq_id,))
    assert {row.num_draft_tokens for row in drafted} == {1, 2, 4}
