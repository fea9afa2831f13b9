"""Tests of adaptive draft lengths, alone and in the engine with a fake target."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.drafts.draft_length import DraftLength, LengthRule, share_budget
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import SpeculationOptions
from tests.specdec.engines import (
    HashTarget,
    ScriptedProposer,
    engine_config,
    make_engine,
    request,
    run,
)

RULE = LengthRule(min_tokens=1, max_tokens=8, raise_above=0.8, lower_below=0.4)
PROMPT = [11, 12, 13, 14, 11, 12]


@pytest.mark.parametrize(
    ("num_tokens", "num_drafted", "num_accepted", "expected"),
    [
        (5, 5, 5, 8),  # twice 5 is beyond the upper bound
        (3, 3, 3, 6),
        (5, 5, 4, 5),  # 0.8 is not above 0.8
        (5, 5, 2, 5),  # 0.4 is not below 0.4
        (5, 5, 1, 4),
        (5, 5, 0, 4),
        (1, 1, 0, 1),  # the lower bound
        (8, 8, 8, 8),
        (5, 3, 3, 5),  # nothing was learned about a draft of 5
        (5, 3, 0, 4),
        (5, 0, 0, 5),
    ],
)
def test_a_hand_worked_step(num_tokens, num_drafted, num_accepted, expected):
    length = RULE.after(DraftLength(3, num_tokens), num_drafted, num_accepted)
    assert length == DraftLength(3, expected)


def test_the_thresholds_are_configurable():
    rule = LengthRule(min_tokens=2, max_tokens=10, raise_above=0.5, lower_below=0.2)
    assert rule.after(DraftLength(5, 5), 5, 3).num_tokens == 10
    assert rule.after(DraftLength(5, 5), 5, 1).num_tokens == 5
    assert rule.after(DraftLength(5, 2), 2, 0).num_tokens == 2


def test_another_start_resets_the_length():
    length = RULE.begin(None, 3)
    assert length == DraftLength(3, 3)
    longer = RULE.after(length, 3, 3)
    assert RULE.begin(longer, 3) == longer
    assert RULE.begin(longer, 2) == DraftLength(2, 2)


@given(
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(1, 32),
    st.lists(st.tuples(st.integers(0, 32), st.floats(0, 1))),
)
def test_the_bounds_hold(low, span, start, drafts):
    """A start out of the bounds, which an operator may choose, never moves further away."""
    rule = LengthRule(min_tokens=low, max_tokens=low + span)
    length = rule.begin(None, start)
    for num_drafted, share in drafts:
        length = rule.after(length, num_drafted, round(share * num_drafted))
        assert min(low, start) <= length.num_tokens <= max(low + span, start)


@given(st.lists(st.integers(0, 32)), st.integers(0, 200))
def test_a_budget_is_shared_fairly_and_used_up(wanted, budget):
    shares = share_budget(wanted, budget)
    assert sum(shares) == min(budget, sum(wanted))
    assert all(0 <= share <= wish for share, wish in zip(shares, wanted, strict=True))
    unfulfilled = [share for share, wish in zip(shares, wanted, strict=True) if share < wish]
    assert not unfulfilled or max(shares) <= min(unfulfilled) + 1


def test_the_remainder_goes_to_the_first():
    assert share_budget([5, 1, 5, 5], 12) == [4, 1, 4, 3]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"adaptive_length": True, "adaptive_length_min": 0}, "adaptive_length_min"),
        ({"adaptive_length": True, "adaptive_length_max": 33}, "adaptive_length_max"),
        ({"adaptive_length": True, "adaptive_length_max": 2}, "num_speculative_tokens"),
        ({"adaptive_length": True, "adaptive_length_min": 4}, "num_speculative_tokens"),
        ({"adaptive_length": True, "adaptive_length_raise_above": 1.1}, "raise_above"),
        ({"adaptive_length": True, "adaptive_length_lower_below": 0.9}, "lower_below"),
        ({"adaptive_length_max": 9}, "adaptive_length_max"),
        ({"adaptive_length_lower_below": 0.3}, "adaptive_length_lower_below"),
    ],
)
def test_invalid_configurations_are_rejected(values, field):
    with pytest.raises(InvalidValueError, match=field):
        SpeculativeConfig.of("ngram", num_speculative_tokens=3, **values)


@pytest.fixture
def target():
    return HashTarget(block_size=4, vocab_size=383)


def adaptive_engine(tiny_model_dir, target, drafts, **changes):
    speculation = SpeculativeConfig.of(num_speculative_tokens=3, adaptive_length=True)
    config = engine_config(speculation=speculation, **changes)
    return make_engine(tiny_model_dir, config, target, ScriptedProposer(drafts))


def draft_lengths(target):
    return [row.num_draft_tokens for step in target.steps for row in step.rows if row.samples][1:]


def test_right_drafts_get_longer(tiny_model_dir, target):
    engine = adaptive_engine(tiny_model_dir, target, target.continuation)
    generated = run(engine, [request("r", PROMPT, max_tokens=60)])
    assert generated["r"].token_ids == target.continuation(PROMPT, 60)
    assert draft_lengths(target)[:4] == [3, 6, 8, 8]


def test_wrong_drafts_get_shorter(tiny_model_dir, target):
    engine = adaptive_engine(tiny_model_dir, target, lambda tokens, count: [99] * count)
    run(engine, [request("r", PROMPT, max_tokens=20)])
    assert draft_lengths(target)[:4] == [3, 2, 1, 1]


def test_each_sequence_has_its_own_length(tiny_model_dir, target):
    """One has right drafts, one has wrong drafts, and one requests a fixed number of tokens."""

    def drafts(tokens, count):
        return target.continuation(tokens, count) if tokens[0] != 13 else [99] * count

    engine = adaptive_engine(tiny_model_dir, target, drafts)
    asked = [
        request("right", [11, 12, 13], max_tokens=40),
        request("wrong", [13, 12, 11], max_tokens=40),
        request(
            "own",
            [12, 12, 12],
            max_tokens=40,
            speculation=SpeculationOptions(num_speculative_tokens=2),
        ),
    ]
    run(engine, asked)
    rows = {row.seq_id: row.num_draft_tokens for row in target.steps[5].rows}
    assert rows == {0: 8, 1: 1, 2: 2}


def test_a_short_budget_is_shared(tiny_model_dir, target):
    """Eight decode and 16 tokens fit: drafts get half of what is left, one token for each of 4."""
    config = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    engine = adaptive_engine(tiny_model_dir, target, target.continuation, **config)
    generated = run(engine, [request(f"r{i}", [10 + i % 5] * 2, max_tokens=30) for i in range(8)])
    assert all(len(each.token_ids) == 30 for each in generated.values())
    decoding = [step for step in target.steps if all(len(row.known) == 1 for row in step.rows)]
    assert [row.num_draft_tokens for row in decoding[0].rows] == [1] * 4 + [0] * 4
