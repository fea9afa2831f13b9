"""Drafts of heads without KV in steps on the device: those of the host, all launched at once.

Also drafts of any head beside rows that the host verifies.
"""

from dataclasses import replace
from functools import cache

import pytest

from specdec.config.gpu import graph_sizes
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.types.messages import (
    PENDING_TOKEN,
    BlockTableDelta,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.step_graphs import Part, Stage, StepShape
from specdec.worker.head.runner import HeadRunner
from specdec.worker.warm_up import warm_up_target
from tests.specdec.engines import engine_config, local_engine, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import HEADS
from tests.specdec.worker.device.head.test_head import (
    NUM_DRAFTS,
    SHAPED,
    config_of,
    num_with_drafts,
    requests,
    run_target,
    shaped,
)
from tests.specdec.worker.device.runners import FakeGraphs, device_runner, recorded_device_steps
from tests.specdec.worker.operators import Operators


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Return the tokens without speculation."""
    return tokens_by(local_engine(tiny_model_dir, engine_config(0), kernels="torch"), requests())


@pytest.fixture(scope="module")
def head_dir(tiny_model_dir, tmp_path_factory, expected):
    """Return a function that gives the directory of a head, some of whose drafts are right."""
    texts = [[*each.prompt, *expected[each.request_id]] for each in requests()]
    return cache(
        lambda method: HEADS[method](tiny_model_dir, tmp_path_factory.mktemp(method), texts)
    )


@pytest.fixture
def on_device(monkeypatch):
    """Return a list with an entry for each step that ran on the device: its rows."""
    return recorded_device_steps(monkeypatch)


def drafts_of(target):
    return [[row.next_draft_token_ids for row in output.rows] for output in target.outputs]


@pytest.mark.parametrize(
    ("method", "is_async", "has_graphs"),
    [
        ("medusa", True, True),
        ("hydra", True, False),
        ("mlp_speculator", False, False),
    ],
)
def test_the_drafts_are_those_of_the_host(
    tiny_model_dir, head_dir, expected, on_device, method, is_async, has_graphs
):
    """Every step yields the same tokens and drafts; prompts are chunked."""
    run = [tiny_model_dir, head_dir(method), method]
    changes = {"async_scheduling": is_async, "max_num_batched_tokens": 20}
    tokens, host, _ = run_target(*run, runs_on_device=False, changes=changes, off=range(3, 5))
    assert tokens == expected
    assert not on_device
    graphs = FakeGraphs() if has_graphs else None
    found, target, engine = run_target(*run, graphs=graphs, changes=changes, off=range(3, 5))
    assert found == expected
    assert target.outputs == host.outputs
    counts = engine.stats().counts
    assert len(on_device) == counts.num_steps
    assert num_with_drafts(on_device) >= 5
    assert counts.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_the_host_drafts_only_after_the_rows_that_it_verifies(
    tiny_model_dir, head_dir, on_device, monkeypatch, method
):
    """The device has run the pass of all rows, and drafts after the others."""
    verifiers = ["rejection", None, "block"]
    asked = [
        replace(each, params=replace(each.params, temperature=0.8, max_tokens=8 + 4 * i))
        for i, each in enumerate(requests(3))
    ]
    asked = [
        replace(each, params=replace(each.params, speculation=SpeculationOptions(verifier=name)))
        for each, name in zip(asked, verifiers, strict=True)
    ]
    run = [tiny_model_dir, head_dir(method), method]
    tokens, host, _ = run_target(*run, asked=asked, runs_on_device=False)
    drafted, draft = [], HeadRunner.draft_next

    def recorded(self, rows, states, verified):
        drafted.extend(row.seq_id for row in rows if row.drafting.num_next)
        return draft(self, rows, states, verified)

    monkeypatch.setattr(HeadRunner, "draft_next", recorded)
    found, target, engine = run_target(*run, asked=asked)
    assert found == tokens
    assert [each.rows for each in target.outputs] == [each.rows for each in host.outputs]
    assert len(on_device) == engine.stats().counts.num_steps
    assert set(drafted) == {0, 2}
    assert any(row.seq_id == 1 and row.drafting.num_next for rows in on_device for row in rows)


def test_no_draft_is_held_after_a_row_of_the_host_that_makes_none(
    tiny_model_dir, head_dir, on_device
):
    """As after a step with a prompt, in which drafts do not pay."""
    config = config_of("medusa", head_dir("medusa"))
    runner = device_runner(tiny_model_dir, config, head=head_dir("medusa"))
    prompt = (7, 8, 9)
    rules = SamplingRules(temperature=0.8, verifier=Verifier("rejection"))
    admission = SequenceAdmission(0, len(prompt), rules, prompt)
    table = BlockTableDelta(0, 0, tuple(range(10)))
    row = StepRow(0, 0, prompt, 0, True, RowDrafting(num_next=NUM_DRAFTS))
    [first] = runner.execute(StepInput(0, (), (admission,), (table,), (row,))).rows
    assert len(first.next_draft_token_ids) == NUM_DRAFTS
    plain = StepRow(0, len(prompt), first.token_ids, 0, True)
    runner.execute(StepInput(1, (), (), (), (plain,)))
    pending = plain._replace(
        token_ids=(PENDING_TOKEN,), drafting=RowDrafting(num_held=NUM_DRAFTS), max_end=40
    )
    runner.execute(StepInput(2, (), (), (), (pending,)))
    assert [rows[0].num_draft_tokens for rows in on_device] == [0, 0, 0]


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_a_head_drafts_by_the_logits_of_the_target(tiny_model_dir, head_dir, on_device, method):
    run, changes = [tiny_model_dir, head_dir(method), method], {"async_scheduling": True}
    tokens, host, _ = run_target(*run, asked=shaped(), runs_on_device=False, changes=changes)
    found, target, _ = run_target(*run, asked=shaped(), changes=changes)
    assert found == tokens
    assert drafts_of(target) == drafts_of(host)
    assert len(on_device) == len(target.outputs)
    assert len(shaped()) == len(SHAPED)


def test_ranks_agree(tiny_model_dir, head_dir, expected):
    def on_rank(group):
        tokens, target, _ = run_target(tiny_model_dir, head_dir("medusa"), "medusa", group)
        return tokens, target.outputs

    found = run_ranks(2, on_rank)
    assert found[0] == found[1]
    assert found[0][0] == expected


@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(64, 59), (5, 4)])
def test_the_longest_warm_up_fits_the_block_tables(
    tiny_model_dir, head_dir, on_device, max_model_len, num_tokens
):
    """A prompt with drafts after it is no longer than a sequence may be."""
    directory = head_dir("medusa")
    config = config_of("medusa", directory, max_model_len=max_model_len)
    runner = device_runner(tiny_model_dir, config, head=directory)
    warm_up_target(runner, max_model_len - 1, max_model_len)
    assert [len(row.token_ids) for rows in on_device for row in rows] == [num_tokens, 1]
    assert num_with_drafts(on_device) == (2 if max_model_len == 64 else 0)
    assert runner.num_in_flight == 0


def test_another_head_has_its_own_graphs(tiny_model_dir, head_dir):
    """Graphs of the target's stages stay."""
    graphs, method = FakeGraphs(), "medusa"
    config = config_of(method, head_dir(method), max_num_seqs=2)
    runner = device_runner(tiny_model_dir, config, graphs, head=head_dir(method))
    num_captured = graphs.num_captured
    runner.head.replace_head(runner.head.head)
    stages = [stage for stage, _ in runner.device_steps._graphs._replays]
    num_of_head = sum(stage.part in (Part.START, Part.CHAIN) for stage in stages)
    assert graphs.num_captured - num_captured == num_of_head > 0
    lens = {
        s.query_len
        for stage, s in runner.device_steps._graphs._replays
        if stage == Stage(Part.CHAIN, SamplingKind.GREEDY)
    }
    assert lens == {2, 3, 4}


def test_a_draft_after_a_step_without_padding_has_no_further_rows(
    tiny_model_dir, head_dir, monkeypatch
):
    """A larger shape would read and write rows that no step has filled for this draft."""
    monkeypatch.setattr(graph_sizes, "MAX_GRAPH_TOKENS", 12)  # 4 rows of 3 tokens
    config = config_of("medusa", head_dir("medusa"), max_num_seqs=4)
    steps = device_runner(
        tiny_model_dir, config, FakeGraphs(), head=head_dir("medusa")
    ).device_steps
    shape = StepShape(3, 1 + NUM_DRAFTS, 5)
    assert steps._graphs.padded(shape) == shape, "as large steps have no graph"
    launched, run = [], steps._graphs.run

    def recorded(stage, shape, launch):
        launched.append((stage, shape))
        run(stage, shape, launch)

    monkeypatch.setattr(steps._graphs, "run", recorded)
    steps._fill_with_padding(shape)
    steps._launcher.launch(StepPlan(shape, SamplingKind.GREEDY, 2))
    assert [each.num_rows for _, each in launched] == [3] * 4
    assert launched[-1] == (Stage(Part.CHAIN, SamplingKind.GREEDY), shape._replace(query_len=3))


def test_a_draft_launches_few_operators(tiny_model_dir, head_dir):
    """Medusa heads draft three greedy tokens."""
    config = config_of("medusa", head_dir("medusa"), max_num_seqs=2)
    launcher = device_runner(tiny_model_dir, config, head=head_dir("medusa")).device_steps._launcher
    counts = []
    for num_next in (0, NUM_DRAFTS):
        with Operators() as operators:
            launcher.launch(StepPlan(StepShape(2, 1, 5), SamplingKind.GREEDY, num_next))
        counts.append(operators.counts.total())
    assert counts[1] - counts[0] < 30 + 40 * NUM_DRAFTS
