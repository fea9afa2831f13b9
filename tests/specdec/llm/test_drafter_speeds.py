"""The choice by measured rounds: the fastest, within the noise the smallest; bounded repetition."""

from dataclasses import asdict, replace
from itertools import count, cycle

import pytest

from specdec.config.model_aliases import ShippedDrafter
from specdec.llm.drafter_speeds import (
    Candidate,
    DrafterSpeeds,
    Gain,
    best_speedup,
    comparable,
    gain_of,
    measure_rounds,
    speeds_from,
)
from specdec.models.drafters.card import SuiteAcceptance
from specdec.speculation.policy.cost_table import CostTable
from specdec.types.errors import InvalidValueError

LOOKUP = (SuiteAcceptance("a", 0.0, 0.5, (0.4, 0.2)), SuiteAcceptance("b", 0.0, 1.0, (0.1, 0.0)))
NGRAM = (SuiteAcceptance("a", 0.0, 1.0, (0.9, 0.8)), SuiteAcceptance("b", 0.0, 1.0, (0.8, 0.7)))
HALF = (SuiteAcceptance("a", 0.0, 1.0, (0.5,)),)

HEAD = ShippedDrafter("head", "eagle3", 2)
DRAFT = ShippedDrafter("draft", "colocated_draft_model", 2)
SUFFIX = ShippedDrafter("suffix", "suffix", 2, has_weights=False)
ALL = (HEAD, DRAFT, SUFFIX)


def table(*seconds):
    return CostTable((1,), tuple(range(len(seconds))), (seconds,))


def speeds(head, draft, suffix):
    """Return speeds of five rounds; a gain is one number, or those of the rounds."""

    def rounds(gain):
        return gain if isinstance(gain, tuple) else (gain,) * 5

    gains = {"head": rounds(head), "draft": rounds(draft), "suffix": rounds(suffix)}
    return DrafterSpeeds((100.0,) * 5, gains)


def test_the_best_number_of_draft_tokens_counts():
    costs = table(0.010, 0.012, 0.020)
    # Half of the steps have a draft: 1.4 tokens in 11 ms, or 1.6 in 15 ms, instead of 1 in 10 ms.
    assert best_speedup(costs, LOOKUP[0]) == pytest.approx(1.4 / 1.1)
    assert best_speedup(costs, LOOKUP[1]) == 1  # no draft pays


def test_suites_count_by_the_time_that_they_take():
    assert gain_of(table(0.01, 0.01, 0.01), NGRAM) == pytest.approx(2 / (1 / 2.7 + 1 / 2.5))


def test_only_suites_that_all_cards_have_are_compared():
    other = SuiteAcceptance("edit", 0.0, 1.0, (1.0, 1.0))
    assert comparable({"first": (LOOKUP[1], other), "second": NGRAM}) == {
        "first": [LOOKUP[1]],
        "second": [NGRAM[1]],
    }


def test_the_slowest_and_the_fastest_quarter_of_the_rounds_do_not_count():
    assert Gain.of((9.0, 1.0, 2.0, 0.1, 1.5)) == Gain(1.0, 1.5, 2.0)
    assert Gain.of([1.5, 1.0, 2.0, 9.0, 9.0, 0.1, 0.1, 1.5]) == Gain(1.0, 1.5, 2.0)
    assert Gain(1.0, 1.5, 2.0).spread == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((1.46, 1.99, 1.2), DRAFT),  # no margin
        ((1.46, 1.40, 1.2), HEAD),
        ((1.0, 1.0, 1.01), SUFFIX),
    ],
)
def test_the_fastest_is_chosen(gains, expected):
    found = speeds(*gains)
    assert found.choose(ALL) == expected
    assert found.describe(expected).startswith(
        f"drafter {expected.name}: {max(gains):.2f} times the speed without drafts, "
        f"{100 * max(gains):.0f} tokens/s expected"
    )


def test_within_the_noise_the_one_with_the_least_memory_is_chosen():
    noisy = (1.58, 1.60, 1.62, 1.64, 1.66)
    found = speeds(1.6, noisy, 1.2)
    assert found.is_settled
    assert found.choose(ALL) == HEAD, "the first of them"
    assert speeds(1.57, noisy, 1.2).choose(ALL) == DRAFT
    assert speeds(1.7, noisy, 1.7).choose(ALL) == SUFFIX


def test_where_rounds_differ_the_default_is_chosen():
    wide = (1.2, 1.4, 1.6, 1.8, 2.0)
    found = speeds(1.2, 1.2, wide)
    assert found.spread == pytest.approx(0.4 / 1.6)
    assert found.choose(ALL) == HEAD
    assert found.describe(HEAD) == (
        "drafter head, the default: speeds differ by 25% between rounds, as under other load; "
        "they are not stored"
    )
    # A drafter that cannot be the fastest may differ.
    assert speeds(2.1, 1.2, wide).is_settled


@pytest.fixture
def turns():
    """Return the order in which candidates are measured."""
    return []


def candidate(turns, name, seconds):
    """Return a candidate with steps of 10 ms without drafts, and of these milliseconds with one."""
    values = cycle(seconds)

    def measure():
        turns.append(name)
        return table(0.010, next(values) / 1000)

    return Candidate([name], measure)


def test_candidates_take_turns_five_times(turns):
    one, two = candidate(turns, "one", [10]), candidate(turns, "two", [12])
    acceptance = {"one": HALF, "two": HALF}
    found = measure_rounds([one, two], acceptance, count().__next__)
    assert turns == ["one", "two"] * 5
    assert found.plain == pytest.approx([100] * 5)
    assert found.gains == {
        "one": pytest.approx([1.5] * 5),
        "two": pytest.approx([1.25] * 5),
    }


def test_load_that_slows_a_whole_table_does_not_count():
    def measure_slow():
        return table(0.03, 0.03)

    slow = Candidate(["slow"], measure_slow)
    fast = Candidate(["fast"], lambda: table(0.01, 0.012))
    acceptance = {"fast": HALF, "slow": HALF}
    found = measure_rounds([fast, slow], acceptance, count().__next__)
    by_name = found.by_name
    assert by_name["slow"].median > by_name["fast"].median
    assert found.plain_tokens_per_s == pytest.approx(100)


def test_rounds_that_differ_are_repeated_until_they_agree(turns):
    # Gains of 1.5, 1.25, 1.0 and then 1.5: with eight rounds the slowest quarter is two.
    noisy = candidate(turns, "one", [10, 12, 15, *[10] * 12])
    found = measure_rounds([noisy], {"one": HALF}, count().__next__)
    assert len(turns) == 8
    assert found.is_settled
    assert found.by_name["one"] == Gain(*[pytest.approx(1.5)] * 3)


@pytest.mark.parametrize(
    ("seconds_a_round", "expected"), [(0.5, 15), (2.0, 7), (3.0, 5), (5.0, 3), (100.0, 3)]
)
def test_the_repetition_is_bounded_by_rounds_and_time(turns, seconds_a_round, expected):
    noisy = candidate(turns, "one", [10, 13, 16])
    found = measure_rounds([noisy], {"one": HALF}, lambda: seconds_a_round * len(turns))
    assert len(turns) == expected
    assert not found.is_settled


def test_speeds_survive_json():
    found = speeds(1.6, 2.0, 1.2)
    assert speeds_from(asdict(found), ALL) == found


@pytest.mark.parametrize(
    "change",
    [
        {"plain": (1.0,) * 2},
        {"plain": (float("inf"),) * 5},
        {"plain": (0.0,) * 5},
        {"gains": {"head": (1.0,) * 5}},
    ],
)
def test_incomplete_speeds_are_refused(change):
    with pytest.raises(InvalidValueError):
        speeds_from(asdict(speeds(1.6, 2.0, 1.2)) | change, ALL)
    with pytest.raises(InvalidValueError):
        speeds_from(asdict(speeds(1.6, 2.0, 1.2)), (replace(HEAD, name="other"), DRAFT, SUFFIX))
