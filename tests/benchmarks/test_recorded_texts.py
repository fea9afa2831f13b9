"""Tests of recorded texts: the hits that the ranks of their tokens let expect."""

import numpy as np
import pytest
import torch

from benchmarks.recorded_texts import (
    RecordedText,
    RecordedTexts,
    _rates_of,
    expected_hit_rate,
    rank_rates,
)
from specdec.speculation.proposers.outcome_statistics import MAX_FAN_OUT
from specdec.types.draft_messages import AheadRow

PROMPT = (5, 6, 7)


def text_of(ranks):
    """Return a text whose tokens have these ranks in the draft model's order."""
    ranks = np.array(ranks)
    output = tuple((20 + np.arange(len(ranks)) % 50).tolist())
    ranked = np.array(output)[:, None] + 60 + np.arange(MAX_FAN_OUT + 1)
    known = np.flatnonzero(ranks <= MAX_FAN_OUT)
    ranked[known, ranks[known]] = np.array(output)[known]
    return RecordedText(PROMPT, output, ranked, _rates_of(ranked == np.array(output)[:, None]))


def row(text, index, num_drafts, fan_out):
    """Return the round after the first `index` tokens of the output."""
    base = len(PROMPT) + index
    drafts = RecordedTexts({0: text}).drafted(0, base, num_drafts)
    return AheadRow(0, base - 1, (text.token(base - 1), *drafts), num_drafts, fan_out, 2, base)


@pytest.mark.parametrize(
    ("ranks", "fan_out", "hits"),
    [
        ((2, 0, 0), (2, 0, 1), 1),  # none accepted; the token is the second of the others
        ((2, 0, 0), (1, 4, 1), 0),
        ((0, 1, 0), (0, 1, 1), 1),
        ((0, 1, 0), (4, 0, 4), 0),
        ((0, 0, 0), (0, 0, 1), 1),  # all accepted, and the best token after them
        ((0, 0, 1), (4, 4, 1), 0),
        ((0, 0, 1), (0, 0, 2), 1),
        ((0, 0, 99), (4, 4, 16), 0),
    ],
)
def test_a_hit_is_an_outcome_within_the_fan_out(ranks, fan_out, hits):
    text = text_of(ranks)
    assert text.expected_hits(row(text, 0, 2, fan_out)) == hits


def test_a_round_at_the_end_of_the_text_has_no_outcome():
    text = text_of([0, 0, 0, 0])
    assert text.expected_hits(row(text, 2, 2, (1, 1, 1))) is None
    rounds = [(text, row(text, 2, 2, (1, 1, 1))), (text, row(text, 1, 2, (1, 1, 1)))]
    assert expected_hit_rate(rounds) == 1.0


def test_the_first_rate_is_the_overlap_of_the_coupling():
    """P(argmax(log p + g) = argmax(log q + g)) = sum over x of 1 / sum over y of the larger ratio.

    The ratios are p(y) / p(x) and q(y) / q(x); the chance of a false alarm is below 1e-6.
    """
    generator = torch.Generator().manual_seed(1)
    target, draft = torch.randn((2, 6, 40), generator=generator) * 2
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    ratios = torch.maximum(p[:, None] / p[..., None], q[:, None] / q[..., None])
    expected = (1 / ratios.sum(-1)).sum(-1)
    found = rank_rates(target, draft, num_samples=20_000)
    assert found.sum(1) == pytest.approx(np.ones(6))
    assert found[:, 0] == pytest.approx(expected.numpy(), abs=0.02)
