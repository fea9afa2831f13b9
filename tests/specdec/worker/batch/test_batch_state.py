"""Invariant tests: after any steps, BatchState equals one that is built from the tokens."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.types.messages import SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier
from specdec.worker.batch.batch_state import BatchState

RULES = SamplingRules(frequency_penalty=0.5, bad_words=((1, 2),))
GREEDY = SamplingRules(temperature=0)
PLAIN_ROW = StepRow(7, 3, (1, 2, 3), 2, True)


class Worker:
    """A sequence on a rank, with the tokens that it is expected to have."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.table = BatchState(4, torch.device("cpu"), range(50))
        self.prompt = self.tokens(self.random.randint(1, 9))
        self.known = list(self.prompt)
        self.is_admitted = False

    def tokens(self, count):
        return [self.random.randrange(5) for _ in range(count)]

    def update(self, *, released=(), admitted=()):
        self.table.update(StepInput(0, released, admitted, (), ()))

    def admit(self):
        admission = SequenceAdmission(7, len(self.prompt), RULES, tuple(self.known))
        self.update(admitted=(admission,))
        self.is_admitted = True

    def preempt(self):
        if self.is_admitted:
            self.update(released=(7,))
            self.is_admitted = False

    def row(self, start, end, drafts=(), *, samples=True):
        tokens = (*self.known[start:end], *drafts)
        return StepRow(7, start, tokens, len(drafts), samples)

    def check(self):
        history = self.table._states[7].history
        fresh = BatchState(4, torch.device("cpu"), range(50))
        admission = SequenceAdmission(7, len(self.prompt), RULES, tuple(self.known))
        fresh.update(StepInput(0, (), (admission,), (), ()))
        expected = fresh._states[7].history
        assert list(history.token_ids) == list(expected.token_ids) == self.known
        ours, others = history.counts(), expected.counts()
        assert ours.token_ids.tolist() == others.token_ids.tolist()
        assert ours.num_in_output.tolist() == others.num_in_output.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_histories_of_a_target_with_drafts_and_preemption(seed):
    worker = Worker(seed)
    for _ in range(60):
        if worker.random.random() < 0.1:
            worker.preempt()
        if not worker.is_admitted:
            worker.admit()
            middle = worker.random.randint(0, len(worker.known) - 1)
            if middle:
                worker.table.update_histories([worker.row(0, middle, samples=False)])
                worker.check()
            row = worker.row(middle, len(worker.known))
        else:
            drafts = worker.tokens(worker.random.randint(0, 4))
            row = worker.row(len(worker.known) - 1, len(worker.known), drafts)
        worker.table.update_histories([row])
        worker.check()
        worker.table.logits_processor([row])
        worker.check()
        num_accepted = worker.random.randint(0, row.num_draft_tokens)
        new = [*row.drafts[:num_accepted], *worker.tokens(1)]
        worker.table.append_output(row, new)
        worker.known += new
        worker.check()


@pytest.mark.parametrize("seed", range(20))
def test_histories_of_a_draft_model_that_lags(seed):
    """Draft tokens stay in the history until the next row, which has the accepted ones."""
    worker = Worker(seed)
    worker.admit()
    num_computed = 0
    for _ in range(60):
        if worker.random.random() < 0.1:
            worker.preempt()
            worker.admit()
            num_computed = 0
        if worker.random.random() < 0.3:
            worker.known += worker.tokens(worker.random.randint(1, 6))  # not drafted
        end = len(worker.known) - 1
        if num_computed < end and worker.random.random() < 0.5:
            chunk_end = worker.random.randint(num_computed + 1, end)
            worker.table.update_histories([worker.row(num_computed, chunk_end, samples=False)])
            num_computed = chunk_end
        row = worker.row(num_computed, len(worker.known))
        worker.table.update_histories([row])
        worker.check()
        drafted = worker.tokens(worker.random.randint(0, 4))
        for place, token in enumerate(drafted):
            worker.table.update_histories([StepRow(7, row.end + place, (token,), 0, True)])
        num_true = worker.random.randint(0, len(drafted))
        num_computed = min(row.end + num_true, row.end + max(0, len(drafted) - 1))
        worker.known += [*drafted[:num_true], *worker.tokens(1)]


def test_penalties_include_earlier_drafts_of_the_row():
    table = BatchState(4, torch.device("cpu"), range(10))
    rules = SamplingRules(frequency_penalty=1.0, min_tokens=2, end_token_ids=(9,))
    admission = SequenceAdmission(0, 2, rules, (1, 2))
    other = SequenceAdmission(1, 1, SamplingRules())
    table.update(StepInput(0, (), (admission, other), (), ()))
    rows = [StepRow(1, 0, (5,), 0, True), StepRow(0, 0, (1, 2, 3, 3, 4), 3, True)]
    table.update_histories(rows)
    edits = table.logits_processor(rows)
    logits = edits.apply(torch.zeros(5, 10))
    assert logits[0].tolist() == [0] * 10
    taken = [{3: 0}, {3: 1}, {3: 2}, {3: 2, 4: 1}]
    for row, expected in zip(logits[1:], taken, strict=True):
        for token in range(9):
            assert row[token] == -expected.get(token, 0)
    assert logits[1:, 9].isneginf().tolist() == [True, True, False, False]
    assert edits.rows == [1, 2, 3, 4]


def test_no_history_without_rules_that_need_tokens():
    table = BatchState(4, torch.device("cpu"), range(10))
    table.update(StepInput(0, (), (SequenceAdmission(0, 3, SamplingRules()),), (), ()))
    row = StepRow(0, 0, (1, 2, 3), 0, True)
    table.update_histories([row])
    table.append_output(row, (4,))
    assert table._states[0].history is None


def is_plain_greedy(rules, row):
    table = BatchState(4, torch.device("cpu"), range(50))
    table.update(StepInput(0, (), (SequenceAdmission(7, 3, rules, (1, 2, 3)),), (), ()))
    return table.is_plain_greedy(row)


def test_a_greedy_row_with_drafts_is_plain_greedy():
    assert is_plain_greedy(GREEDY, PLAIN_ROW)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 0.5),)},
        {"bad_words": ((1, 2),)},
        {"allowed_token_ids": (1, 2)},
        {"min_tokens": 2, "end_token_ids": (0,)},
        {"logprobs": 0},
        {"verifier": Verifier("typical")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_rules_that_are_not_plain_greedy(changes):
    assert not is_plain_greedy(replace(GREEDY, **changes), PLAIN_ROW)


@pytest.mark.parametrize(
    "changes",
    [
        {"grammar_mask": np.full((3, 2), -1, dtype=np.int32)},
        {"num_draft_tokens": 1, "num_lookahead_tokens": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_rows_that_are_not_plain_greedy(changes):
    assert not is_plain_greedy(GREEDY, PLAIN_ROW._replace(**changes))
