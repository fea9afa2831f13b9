# Modules: specdec.worker.device.input.buffers, specdec.worker.draft_sampler, specdec.worker.loading
"""Drafts of a draft model on the device: those of the host, launched without waiting between."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.engine import DraftLimits
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.proposers import DraftModelProposer, DraftVocabulary
from specdec.types.draft_messages import DraftRow, DraftStep
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepRow
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import LocalDraftWorker
from specdec.worker.device.input.buffers import PendingTokens
from specdec.worker.device.step_graphs import StepShape
from specdec.worker.device.steps import DeviceSteps
from specdec.worker.loading import RankModel, load_draft
from tests.specdec.engines import engine_config, local_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.worker.device.recorded_graphs import graphs_of
from tests.specdec.worker.device.runners import FakeGraphs, device_draft_runner
from tests.specdec.worker.device.test_steps import requests

LIMITS = DraftLimits(
    num_blocks=200, block_size=4, max_model_len=160, max_catch_up_tokens=16, max_num_seqs=8
)


def host_runner(directory, group=None):
    group = group or TensorParallelGroup()
    return load_draft(RankModel(directory, "float32", LIMITS, kernels="torch"), group)


def generate(directory, runner, given, num_drafts=4, group=None):
    """Return the tokens of requests, and the numbers of drafts and of accepted ones."""
    worker = LocalDraftWorker(runner)
    proposer = DraftModelProposer(worker, LIMITS, DraftVocabulary().new_adapter())
    config = engine_config(num_drafts)
    engine = local_engine(directory, config, group=group, proposer=proposer, kernels="torch")
    tokens = {name: each.token_ids for name, each in run(engine, given).items()}
    proposer.check_integrity()
    counts = engine.stats().counts.speculation
    return tokens, counts.num_draft_tokens, counts.num_accepted_tokens


@pytest.fixture
def begun(monkeypatch):
    """Return a list with the rows of each step that was begun on the device."""
    found, begin = [], DeviceSteps.begin

    def counted(self, columns, states, num_kept=None):
        found.append(columns.rows)
        return begin(self, columns, states, num_kept)

    monkeypatch.setattr(DeviceSteps, "begin", counted)
    return found


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_the_drafts_are_those_of_the_host(tiny_model_dir, begun, num_drafts, graphs):
    expected = generate(tiny_model_dir, host_runner(tiny_model_dir), requests(), num_drafts)
    assert not begun
    backend = graphs_of(is_recorded=num_drafts == 4) if graphs else None
    runner = device_draft_runner(tiny_model_dir, LIMITS, backend)
    assert generate(tiny_model_dir, runner, requests(), num_drafts) == expected
    _, num_draft_tokens, num_accepted = expected
    assert num_accepted > 0.9 * num_draft_tokens  # the draft model is the target
    assert any(row.is_pending for rows in begun for row in rows) == (num_drafts > 1)
    # After a draft that was accepted as a whole, two tokens are new.
    assert any(row.num_draft_tokens == 1 for rows in begun for row in rows)


def test_rejected_drafts_are_replaced(tiny_model_dir, tmp_path, begun):
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][::3] *= 0.8
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    expected = generate(tiny_model_dir, host_runner(other), requests())
    runner = device_draft_runner(other, LIMITS, FakeGraphs())
    assert generate(tiny_model_dir, runner, requests()) == expected
    _, num_draft_tokens, num_accepted = expected
    assert 0 < num_accepted < num_draft_tokens
    assert begun


HOST_PARAMS = [
    {"temperature": 0.9, "speculation": SpeculationOptions(verifier="rejection")},
    {"temperature": 0.9, "presence_penalty": 0.5},
    {"speculation": SpeculationOptions(draft_confidence_threshold=0.02)},
]


@pytest.mark.parametrize("params", HOST_PARAMS)
def test_requests_that_need_the_host_are_drafted_there(tiny_model_dir, begun, params):
    given = [request("r", [7, 8, 9] * 3, seed=3, max_tokens=9, **params)]
    expected = generate(tiny_model_dir, host_runner(tiny_model_dir), given)
    runner = device_draft_runner(tiny_model_dir, LIMITS)
    assert generate(tiny_model_dir, runner, given) == expected
    assert expected[1] > 0
    assert not begun


def test_other_sequences_stay_on_the_device(tiny_model_dir, begun):
    """The host drafts for a sequence in separate passes."""
    given = [*requests(3), request("r", [7, 8, 9] * 3, seed=3, max_tokens=9, **HOST_PARAMS[1])]
    expected = generate(tiny_model_dir, host_runner(tiny_model_dir), given)
    runner = device_draft_runner(tiny_model_dir, LIMITS)
    assert generate(tiny_model_dir, runner, given) == expected
    assert {row.seq_id for rows in begun for row in rows} == {0, 1, 2}


BIASED = {"logit_bias": {7: 2.0}, "min_tokens": 5, "stop_token_ids": tuple(range(0, 383, 3))}


def test_drafts_with_biases_are_made_on_the_device(tiny_model_dir, begun):
    given = [request("r", [7, 8, 9] * 3, seed=3, max_tokens=12, temperature=0.7, **BIASED)]
    expected = generate(tiny_model_dir, host_runner(tiny_model_dir), given)
    runner = device_draft_runner(tiny_model_dir, LIMITS)
    assert generate(tiny_model_dir, runner, given) == expected
    assert expected[1] > 0
    assert begun


def test_a_draft_with_a_grammar_is_made_by_the_host(tiny_model_dir, begun):
    runner = device_draft_runner(tiny_model_dir, LIMITS)
    spec = StructuredOutput(regex=".{3,9}")
    step = first_step((0,), 10)
    admission = replace(step.admitted[0], grammar=spec)
    runner.draft(replace(step, admitted=(admission,)))
    runner.catch_up(step)
    row = DraftRow(0, 10, (5,), 2, 11)
    output = runner.draft(DraftStep(1, (), (), (), (), (row,)))
    assert len(output.rows[0].token_ids) == 2
    assert not begun


def test_ranks_agree(tiny_model_dir):
    expected = generate(tiny_model_dir, host_runner(tiny_model_dir), requests(3))

    def on_rank(group):
        runner = device_draft_runner(tiny_model_dir, LIMITS, group=group)
        return generate(tiny_model_dir, runner, requests(3), group=group)

    assert run_ranks(2, on_rank) == [expected] * 2


def first_step(seq_ids, context):
    """Return a step that admits sequences, and runs their text."""
    rules, blocks = SamplingRules(temperature=0.8, seed=5), 12
    return DraftStep(
        0,
        (),
        tuple(SequenceAdmission(seq, context, rules, (3,) * context) for seq in seq_ids),
        tuple(
            BlockTableDelta(seq, 0, tuple(range(seq * blocks, (seq + 1) * blocks)))
            for seq in seq_ids
        ),
        tuple(StepRow(seq, 0, (3 + seq,) * context, 0, samples=False) for seq in seq_ids),
        (),
    )


def drafted(runner, rows):
    step = first_step(range(3), 10)
    runner.draft(step)
    runner.catch_up(step)
    output = runner.draft(DraftStep(1, (), (), (), (), rows))
    return {row.seq_id: row.token_ids for row in output.rows}


ROWS = (
    DraftRow(0, 10, (5,), 4, 11),
    DraftRow(1, 10, (5, 6), 1, 12),
    DraftRow(2, 10, (7, 8), 6, 12),
)


def test_sequences_have_drafts_of_their_own_lengths(tiny_model_dir, begun, monkeypatch):
    expected = drafted(host_runner(tiny_model_dir), ROWS)
    assert {seq: len(ids) for seq, ids in expected.items()} == {0: 4, 1: 1, 2: 6}
    num_begun, collect = [], PendingTokens.collect

    def counted(self):
        num_begun.append(len(begun))
        return collect(self)

    monkeypatch.setattr(PendingTokens, "collect", counted)
    runner = device_draft_runner(tiny_model_dir, LIMITS, FakeGraphs())
    assert drafted(runner, ROWS) == expected
    assert [len(rows) for rows in begun] == [3, 2, 2, 2, 1, 1]
    assert num_begun == [6] * 6  # all steps are launched before the first is waited for


@pytest.mark.parametrize(
    "row",
    [DraftRow(0, 9, (4, 5, 6), 2, 12), DraftRow(0, 10, (5,), 2, 14)],
    ids=["three new tokens", "text of another tokenizer"],
)
def test_other_rows_are_drafted_by_the_host(tiny_model_dir, begun, row):
    expected = drafted(host_runner(tiny_model_dir), (row,))
    assert drafted(device_draft_runner(tiny_model_dir, LIMITS), (row,)) == expected
    assert not begun


def test_a_draft_ends_before_invalid_logits(tiny_model_dir):
    runner = device_draft_runner(tiny_model_dir, LIMITS)
    expected = drafted(runner, ROWS)
    runner.draft(DraftStep(2, (0, 1, 2), (), (), (), ()))
    compute, calls = runner.model.compute_logits, []

    def faulty(hidden):
        calls.append(len(hidden))
        logits = compute(hidden)
        if len(calls) == 3:
            logits[0] = float("nan")
        return logits

    runner.model.compute_logits = faulty
    found = drafted(runner, ROWS)
    assert found == {**expected, 0: expected[0][:2]}


def without_memory(self, columns, states, num_kept=None):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_drafts_without_memory_are_made_by_the_host(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(DeviceSteps, "begin", without_memory)
    runner = device_draft_runner(tiny_model_dir, LIMITS)
    assert drafted(runner, ROWS) == drafted(host_runner(tiny_model_dir), ROWS)


def test_several_ranks_fail_together_without_memory(tiny_model_dir, monkeypatch):
    """The host of one rank would draft in passes in which the others do not take part."""
    monkeypatch.setattr(DeviceSteps, "begin", without_memory)

    def on_rank(group):
        with pytest.raises(torch.OutOfMemoryError):
            drafted(device_draft_runner(tiny_model_dir, LIMITS, group=group), ROWS)
        return True

    assert run_ranks(2, on_rank) == [True, True]


def test_a_closed_model_has_no_graphs(tiny_model_dir):
    runner = device_draft_runner(tiny_model_dir, LIMITS, FakeGraphs())
    graphs, shape = runner.device_drafts._steps._graphs, StepShape(3, 1, 1)
    assert graphs.padded(shape) != shape
    LocalDraftWorker(runner).close()
    assert graphs.padded(shape) == shape
