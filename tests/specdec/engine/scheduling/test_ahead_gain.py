"""Estimates of whether steps that begin ahead with guesses pay."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from specdec.engine.scheduling.ahead_gain import (
    _FIRST_RETRY_STEPS,
    _KEPT_STEPS,
    _MAX_PAUSE,
    _MIN_STEPS,
    _REFRESH_STEPS,
    AheadGain,
)
from specdec.engine.scheduling.async_scheduling import CollectedStep, StepTime
from specdec.sequences.sequence import SequenceStatus
from specdec.types.messages import RowDrafting, StepRow, VerifiedRow, VerifyOutput

DRAFTED = StepRow(1, 8, (1, 2, 3), 2, True)
MISSED = StepRow(1, 8, (1,), 0, True)
SEQ = SimpleNamespace(status=SequenceStatus.RUNNING)


def step(gain, seconds, idle_s, row, accepted, *, decodes_alone=True, seq=SEQ):
    """Report a step of one row; idle_s: None where it began ahead."""
    output = VerifyOutput(0, (VerifiedRow(1, (1,) * (1 + accepted)),))
    collected = CollectedStep([(seq, row)], output, 0, (), StepTime(seconds, idle_s))
    gain.end_step(collected, is_guessed=idle_s is None, decodes_alone=decodes_alone)


def waiting(gain, count, *, idle_s=0.0, accepted=2, **changes):
    for _ in range(count):
        step(gain, 1.0, idle_s, DRAFTED, accepted, **changes)


def ahead(gain, count, *, seconds=1.0):
    for _ in range(count):
        step(gain, seconds, None, DRAFTED, 2)


def test_a_trial_follows_some_steps_that_waited():
    gain = AheadGain()
    waiting(gain, _FIRST_RETRY_STEPS - 1)
    assert not gain.pays(1)
    waiting(gain, 1)
    assert gain.pays(1)
    assert not gain.pays(2), "times of another size"


@pytest.mark.parametrize(
    ("accepted", "idle_s", "pays"),
    [(2, 0.0, True), (1, 0.2, False), (1, 0.9, True), (0, 0.0, True)],
)
def test_a_trial_needs_more_idle_time_where_more_drafts_would_be_missed(accepted, idle_s, pays):
    """After rejected drafts no row is missed; after others the next draft was worth a token."""
    gain = AheadGain()
    waiting(gain, _FIRST_RETRY_STEPS, idle_s=idle_s, accepted=accepted)
    assert gain.pays(1) == pays


def test_steps_with_prompts_have_other_times():
    gain = AheadGain()
    waiting(gain, _FIRST_RETRY_STEPS, idle_s=0.3, decodes_alone=False)
    assert not gain.pays(1)


def test_a_step_ahead_without_guesses_is_no_evidence():
    """It began because no draft was possible."""
    gain = AheadGain()
    for _ in range(_FIRST_RETRY_STEPS):
        collected = CollectedStep([(SEQ, MISSED)], VerifyOutput(0, ()), 0, (), StepTime(1.0, None))
        gain.end_step(collected, is_guessed=False, decodes_alone=True)
    assert not gain._times


@pytest.mark.parametrize("kind", ["waiting", "ahead"])
@pytest.mark.parametrize("num_slow", [1, 3])
def test_a_few_slow_steps_decide_nothing(kind, num_slow):
    gain = AheadGain()
    waiting(gain, _FIRST_RETRY_STEPS, idle_s=0.3)
    ahead(gain, _MIN_STEPS)
    for _ in range(num_slow):
        step(gain, 100.0, 50.0 if kind == "waiting" else None, DRAFTED, 2)
    assert gain.pays(1)


def run(gain, num_steps, *, seconds=1.0):
    """Follow the decisions where 0.3 s are idle; return the places of trials. seconds: ahead."""
    trials, num_ahead = [], 0
    for place in range(num_steps):
        if gain.pays(1):
            trials += [place] * (not num_ahead)
            num_ahead += 1
            ahead(gain, 1, seconds=seconds)
        else:
            num_ahead = 0
            waiting(gain, 1, idle_s=0.3)
    return trials


def test_a_trial_that_saves_no_time_is_the_last_for_long():
    """As where target and engine share cores; each trial doubles the steps until the next."""
    trials = run(AheadGain(), 16 * _FIRST_RETRY_STEPS, seconds=1.3)
    assert len(trials) == 4
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert all(later > 1.8 * earlier for earlier, later in pairwise(gaps))


def test_after_a_trial_that_pays_the_next_one_is_soon_again():
    gain = AheadGain()
    run(gain, 16 * _FIRST_RETRY_STEPS, seconds=1.3)
    assert run(gain, 20 * _FIRST_RETRY_STEPS, seconds=1.0)
    ahead(gain, _KEPT_STEPS, seconds=1.3)
    assert run(gain, 2 * _FIRST_RETRY_STEPS, seconds=1.3)


@pytest.mark.parametrize(
    ("status", "pays"), [(SequenceStatus.RUNNING, False), (SequenceStatus.FINISHED, True)]
)
def test_a_trial_whose_rows_are_missed_ends(status, pays):
    """Those of sequences that have ended are not missed."""
    gain = AheadGain()
    waiting(gain, _FIRST_RETRY_STEPS, idle_s=0.2)
    for _ in range(_REFRESH_STEPS - 1):
        step(gain, 1.0, None, MISSED, 0, seq=SimpleNamespace(status=status))
    assert gain.pays(1) == pays


@pytest.mark.parametrize(
    ("verifier", "parents", "guessed"),
    [("coupled", None, {1: (2, 3)}), ("rejection", None, None), ("coupled", (-1, -1), None)],
)
def test_chains_of_the_coupled_verifier_are_guessed(verifier, parents, guessed):
    """Others are failures, so that attempts become rare."""
    gain = AheadGain()
    waiting(gain, _FIRST_RETRY_STEPS, idle_s=0.3)
    seq = SimpleNamespace(rules=SimpleNamespace(acting_verifier=verifier))
    row = DRAFTED._replace(drafting=RowDrafting(None, parents))
    assert gain.guessed([(seq, row)]) == guessed
    assert gain.pays(1) == (guessed is not None)


def test_a_step_waits_now_and_then_so_that_its_time_is_known():
    gain = AheadGain()
    waiting(gain, _FIRST_RETRY_STEPS, idle_s=0.3)
    ahead(gain, _REFRESH_STEPS)
    assert not gain.pays(1)
    waiting(gain, 1, idle_s=0.3)
    assert gain.pays(1)


def test_attempts_without_a_guess_become_rare_until_one_is_found():
    gain = AheadGain()
    waiting(gain, _FIRST_RETRY_STEPS, idle_s=0.3)
    ahead(gain, _MIN_STEPS)
    attempts = []
    for place in range(2 * _MAX_PAUSE + 1):
        if gain.pays(1):
            attempts.append(place)
            gain.note_failure()
        waiting(gain, 1, idle_s=0.3)
    gaps = [later - earlier for earlier, later in pairwise(attempts)]
    assert gaps == [1, 2, 4, 8, _MAX_PAUSE]
    waiting(gain, _MAX_PAUSE, idle_s=0.3)
    ahead(gain, _MIN_STEPS)
    gain.note_failure()
    waiting(gain, 1, idle_s=0.3)
    assert gain.pays(1)


class Counted(list):
    """Rows that count how often they are read."""

    num_reads = 0

    def __iter__(self):
        self.num_reads += 1
        return super().__iter__()


@pytest.mark.parametrize("is_plausible", [True, False])
def test_rows_are_read_only_where_a_decision_may_follow(is_plausible):
    gain = AheadGain()
    if is_plausible:
        run(gain, 16 * _FIRST_RETRY_STEPS, seconds=1.3)
        waiting(gain, _FIRST_RETRY_STEPS)
    else:
        waiting(gain, 5 * _FIRST_RETRY_STEPS, accepted=1)
    rows = Counted([(SEQ, DRAFTED)])
    output = VerifyOutput(0, (VerifiedRow(1, (1, 1)),))
    collected = CollectedStep(rows, output, 0, (), StepTime(1.0, 0.0))
    for _ in range(_FIRST_RETRY_STEPS):
        gain.end_step(collected, is_guessed=False, decodes_alone=True)
    assert rows.num_reads == 0
