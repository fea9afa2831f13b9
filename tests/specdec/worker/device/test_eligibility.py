"""Each reason for which the host runs a step, or a part of one, and none of them for others."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.types.drafts.draft_decision import chain
from specdec.types.messages import (
    PENDING_TOKEN,
    BlockTableDelta,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_spec import Replay, SamplingRules, Verifier
from specdec.worker.device.eligibility import HostReason, drafted_by_host, verified_by_host
from specdec.worker.device.input.columns import StepColumns
from tests.specdec.engines import engine_config
from tests.specdec.worker.device.runners import device_runner

GREEDY = SamplingRules(temperature=0.0)
BY_RATIO = SamplingRules(verifier=Verifier("rejection"))
BY_CHANCE = SamplingRules(verifier=Verifier("synthetic", synthetic_rates=(0.5,)))
DECODE = StepRow(0, 7, (5,), 0, True)
PENDING = StepRow(0, 7, (PENDING_TOKEN,), 0, True, max_end=40)
NUM_SEQS, NUM_DRAFTS, NUM_PROMPT = 2, 3, 4


@pytest.fixture
def runner(tiny_model_dir):
    speculation = SpeculativeConfig.of("ngram", NUM_DRAFTS)
    config = replace(
        engine_config(3), max_num_seqs=NUM_SEQS, max_num_batched_tokens=16, speculation=speculation
    )
    return device_runner(tiny_model_dir, config)


def admit(runner, rules, count=1):
    """Admit sequences of 8 tokens; return their states."""
    text = tuple(range(3, 11))
    admitted = tuple(SequenceAdmission(i, NUM_PROMPT, rules, text) for i in range(count))
    tables = tuple(BlockTableDelta(i, 0, tuple(range(8))) for i in range(count))
    runner._batch_state.update(StepInput(0, (), admitted, tables, ()))
    return runner._batch_state.states([DECODE._replace(seq_id=i) for i in range(count)])


def reason(runner, rows, rules=GREEDY, drafter=None, preceding=()):
    states = admit(runner, rules, len(rows))
    eligibility = runner.device_steps.eligibility
    return eligibility.reason(StepColumns(rows), states, drafter, preceding)


def drafted(count, **more):
    """Return a row with this number of drafts."""
    return DECODE._replace(token_ids=(5,) * (1 + count), num_draft_tokens=count, **more)


WITH_WORDS = SamplingRules(bad_words=((3, 4),))
WANTS_DRAFT = RowDrafting(num_next=1)
TREE = RowDrafting(num_next=4, next_depth=2)
DRAFTER = Mock(follows_steps=True, has_pairs_before=lambda row: row.num_computed_tokens > 0)
CHUNK = StepRow(0, 0, (3,) * 9, 0, False)
CASES = {
    HostReason.MISSING_PAIRS: lambda runner: reason(
        runner, [CHUNK._replace(drafting=WANTS_DRAFT)], drafter=DRAFTER
    ),
    HostReason.SEQUENCES: lambda runner: reason(
        runner, [DECODE._replace(seq_id=i) for i in range(NUM_SEQS + 1)]
    ),
    HostReason.LOOKAHEAD: lambda runner: reason(
        runner, [DECODE._replace(token_ids=(5, 6), num_lookahead_tokens=1)]
    ),
    HostReason.ADAPTERS: lambda runner: reason(runner, [DECODE._replace(adapter_id=1)]),
    HostReason.PENDING_VERIFIER: lambda runner: reason(runner, [PENDING], BY_RATIO),
    HostReason.PROMPT_LOGPROBS: lambda runner: reason(
        runner, [CHUNK], SamplingRules(prompt_logprobs=0)
    ),
    HostReason.PENDING_KEPT: lambda runner: reason(
        runner, [PENDING._replace(drafting=RowDrafting(num_held=1))], BY_CHANCE
    ),
    HostReason.PENDING_BAD_WORDS: lambda runner: reason(runner, [PENDING], WITH_WORDS),
    HostReason.ROW_TOKENS: lambda runner: reason(runner, [drafted(NUM_DRAFTS + 1)]),
    HostReason.NEXT_DRAFTS: lambda runner: reason(runner, [DECODE._replace(drafting=WANTS_DRAFT)]),
    HostReason.NEXT_TREES: lambda runner: reason(runner, [DECODE._replace(drafting=TREE)]),
    HostReason.STEP_TOKENS: lambda runner: reason(runner, [CHUNK._replace(token_ids=(3,) * 17)]),
}


@pytest.mark.parametrize("expected", CASES, ids=lambda each: each.name)
def test_the_host_runs_a_step_for_a_reason(runner, expected):
    assert CASES[expected](runner) is expected


def test_the_host_replays_an_output_after_the_prompt(runner):
    rules = SamplingRules(prompt_logprobs=0, replay=Replay((5,)))
    assert reason(runner, [DECODE], rules) is HostReason.PROMPT_LOGPROBS


def test_limits_of_launcher_model_and_buffers(runner, monkeypatch):
    steps = runner.device_steps
    eligibility = steps.eligibility
    with monkeypatch.context() as patch:
        patch.setattr(steps._launcher, "_ragged", None)
        assert reason(runner, [CHUNK]) is HostReason.PROMPTS
        patch.setattr(steps._planner, "_most_padding", 0)
        unequal = [DECODE, drafted(NUM_DRAFTS, seq_id=1)]
        assert reason(runner, unequal) is HostReason.ROW_LENGTHS
    with monkeypatch.context() as patch:
        patch.setattr(steps._model, "fits_ragged", lambda *sizes: False)
        assert reason(runner, [CHUNK]) is HostReason.ATTENTION
    with monkeypatch.context() as patch:
        patch.setattr(eligibility, "_limits", Mock(wraps=eligibility._limits))
        eligibility._limits.max_num_seqs, eligibility._limits.max_query_len = NUM_SEQS, 4
        eligibility._limits.max_scored_tokens, eligibility._limits.max_growing_rows = 3, 8
        assert reason(runner, [drafted(NUM_DRAFTS)]) is HostReason.SCORED_TOKENS
        assert reason(runner, [DECODE._replace(drafting=TREE)]) is HostReason.NEXT_TREE_SIZE
    others = [DECODE._replace(seq_id=i) for i in (7, 8)]
    assert all(steps._state.has_place(row.seq_id) for row in others)
    assert reason(runner, [DECODE]) is HostReason.PLACES


@pytest.mark.parametrize("most_padding", [2, 3])
def test_the_cost_of_a_step_has_the_devices_rule_for_padding(runner, monkeypatch, most_padding):
    planner, rows = runner.device_steps.eligibility._planner, [DECODE, drafted(3, seq_id=1)]
    monkeypatch.setattr(planner, "_most_padding", most_padding)
    table = CostTable((2,), (0, 3), ((1.0, 2.0),))
    costs = CostModel(table, most_padding_tokens=most_padding)
    is_cheaper = costs.step_s(2, chain(3), 0.0, 1.5) < costs.step_s(2, chain(3), 0.0)
    assert is_cheaper == planner.is_ragged(StepColumns(rows)) == (most_padding < 3)


def test_every_reason_is_reached():
    limits = {"PROMPTS", "ROW_LENGTHS", "ATTENTION", "SCORED_TOKENS", "NEXT_TREE_SIZE", "PLACES"}
    assert {each.name for each in CASES} | limits == {each.name for each in HostReason}


@pytest.mark.parametrize(
    ("row", "rules"),
    [
        (DECODE, GREEDY),
        (PENDING, GREEDY),
        (drafted(NUM_DRAFTS), GREEDY),
        (CHUNK, GREEDY),
        (DECODE, BY_RATIO),
        (drafted(2, grammar_mask=np.full((3, 12), -1, np.int32)), GREEDY),
        (drafted(2), BY_CHANCE),
        (PENDING, BY_CHANCE),
        (DECODE, SamplingRules(prompt_logprobs=0, logprobs=2, presence_penalty=0.5)),
        (DECODE, WITH_WORDS),
        (PENDING._replace(drafting=WANTS_DRAFT._replace(num_next=0, num_held=2)), GREEDY),
    ],
)
def test_the_device_runs_the_rest(runner, row, rules):
    assert reason(runner, [row], rules) is None


def test_a_head_needs_the_pairs_before_the_first_token_or_a_step_in_flight_that_makes_them(runner):
    first = CHUNK._replace(drafting=WANTS_DRAFT)
    preceding = [first._replace(samples=True)]
    next_rows = PENDING._replace(drafting=WANTS_DRAFT)
    for rows, before, expected in (
        ([first], (), HostReason.MISSING_PAIRS),
        ([next_rows], preceding, HostReason.NEXT_DRAFTS),
        ([next_rows], [CHUNK], HostReason.MISSING_PAIRS),
        ([CHUNK], (), None),
    ):
        assert reason(runner, rows, drafter=DRAFTER, preceding=before) is expected
    both = RowDrafting(num_next=1, num_lookup=1)
    for drafting, expected in (
        (both, HostReason.NEXT_DRAFTS),
        (WANTS_DRAFT, HostReason.MISSING_PAIRS),
        (RowDrafting(num_lookup=1), HostReason.MISSING_PAIRS),
    ):
        before = [first._replace(samples=True, drafting=drafting)]
        row = PENDING._replace(drafting=both)
        assert reason(runner, [row], drafter=DRAFTER, preceding=before) is expected
    without_kv = Mock(follows_steps=False)
    assert reason(runner, [first], drafter=without_kv, preceding=[CHUNK]) is None


def test_rows_are_verified_and_drafted_by_the_host_one_by_one(runner):
    rows = [DECODE, DECODE._replace(seq_id=1)]
    states = [admit(runner, BY_RATIO)[0], admit(runner, GREEDY, 2)[1]]
    assert verified_by_host(rows, states) == {0}
    assert verified_by_host([rows[0]._replace(samples=False), rows[1]], states) == frozenset()
    assert drafted_by_host(rows, states) == [{0}]
    rows[1] = rows[1]._replace(drafting=TREE)
    assert drafted_by_host(rows, states) == [{0}, {0, 1}]
