"""Gain of steps that begin ahead with guessed outcomes of the one in flight.

Such a step saves the time in which the target waits for it, and a row whose outcome was not guessed
runs without the draft that a lookup might have found. Both are measured: in steps that wait for the
one before them, what would be saved and lost; in those that begin ahead, what was.
"""

from __future__ import annotations

import collections.abc
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from specdec.engine.scheduling.async_scheduling import CollectedStep
from specdec.engine.scheduling.decode_run import Rows
from specdec.sequences.sequence import SequenceStatus
from specdec.types.messages import VerifiedRow

_WORTH = 1.03
"""Speedup from which steps begin ahead after a trial. Times of one kind vary."""

_PLAUSIBLE = 0.85
"""Estimated speedup from which a trial is worth its steps. Only the trial shows how long the target
waits for messages: the engine sees the rest of its waits."""

_MIN_STEPS = 8
"""Steps of one kind before their times are known; as many begin ahead for a trial."""

_KEPT_STEPS = 15
"""Latest steps of one kind whose median counts: a few that take long make no difference."""

_REFRESH_STEPS = 32
"""Steps ahead after which one waits for its drafts, so that what is saved and lost stays known."""

_FIRST_RETRY_STEPS, _MAX_RETRY_STEPS = 64, 8192
"""Steps until a trial, and most of them: each one that does not pay, or is not plausible within
_TRIAL_STEPS, doubles them."""

_TRIAL_STEPS = 32
"""Steps in which a trial may begin."""

_OPEN_STEPS = 64
"""Steps before a trial may begin whose outcomes are counted; so are _TRIAL_STEPS after one."""

_MAX_PAUSE = 16
"""Most steps without an attempt after attempts that found no guess, each of which doubles them."""

_KEPT_ROWS = 0.98
"""Part of the weight of earlier rows that a step leaves."""


def _new_seconds() -> deque[float]:
    """Return an empty deque for the seconds of the latest steps of one kind."""
    return deque(maxlen=_KEPT_STEPS)


def _are_known(seconds: deque[float]) -> bool:
    return len(seconds) >= _MIN_STEPS


@dataclass
class _Times:
    """Seconds of steps of one size that waited, of the target's waits, and of steps ahead.

    num_since: steps that waited since the last one ahead, or since a trial was put off.
    retry_steps: of these until a trial.
    """

    waited: deque[float] = field(default_factory=_new_seconds)
    idle: deque[float] = field(default_factory=_new_seconds)
    ahead: deque[float] = field(default_factory=_new_seconds)
    num_since: int = 0
    retry_steps: int = _FIRST_RETRY_STEPS

    def add_waited(self, seconds: float, idle_s: float) -> None:
        """Record a step that waited; a trial begins now and then, or is put off."""
        self.waited.append(seconds)
        self.idle.append(min(idle_s, seconds))
        self.num_since += 1
        if self.num_since == self.retry_steps:
            self.ahead.clear()
        elif self.num_since == self.retry_steps + _TRIAL_STEPS:
            self.num_since = 0
            self.end_trial(pays=False)

    def add_ahead(self, seconds: float) -> None:
        self.ahead.append(seconds)
        self.num_since = 0

    def end_trial(self, *, pays: bool) -> None:
        self.retry_steps = (
            _FIRST_RETRY_STEPS if pays else min(2 * self.retry_steps, _MAX_RETRY_STEPS)
        )

    def pays(self, lost_share: float) -> bool:
        """Return whether a step is to begin ahead, where this loses a part of the tokens."""
        if not _are_known(self.waited):
            return False
        is_trial = not _are_known(self.ahead)
        if is_trial and not self.ahead and self.num_since < self.retry_steps:
            return False
        waited = median(self.waited)
        ahead = waited if is_trial else median(self.ahead)
        speedup = (waited + median(self.idle)) * (1 - lost_share)
        return speedup > ahead * (_PLAUSIBLE if is_trial else _WORTH)

    @property
    def are_open(self) -> bool:
        """Return whether a decision may follow soon, for which outcomes have to be known."""
        return self.num_since < _TRIAL_STEPS or self.num_since >= self.retry_steps - _OPEN_STEPS


@dataclass
class _Outcomes:
    """Weighted counts of rows, those that run without a draft ahead, and draft tokens in waiting.

    rows_after, accepted_after: rows after an outcome that would not be guessed, and their accepted
    tokens.
    """

    rows: float = 0.0
    missed: float = 0.0
    accepted: float = 0.0
    rejected: float = 0.0
    rows_after: float = 0.0
    accepted_after: float = 0.0
    _unguessed: frozenset[int] = frozenset()  # sequences whose last outcome would not be guessed

    def add(
        self, rows: Rows, results: collections.abc.Sequence[VerifiedRow], *, is_guessed: bool
    ) -> None:
        """Count the rows of a step. is_guessed: whether it began ahead."""
        self._decay(is_guessed=is_guessed)
        num_tokens = {each.seq_id: len(each.token_ids) for each in results}
        unguessed = []
        for seq, row in rows:
            if seq.status is not SequenceStatus.RUNNING:
                continue  # it may have ended before this row, which has then no outcome
            seq_id, depth = row.seq_id, row.num_draft_tokens
            num_accepted = max(0, min(depth, num_tokens.get(seq_id, 0) - 1))
            is_full = 0 < depth == num_accepted
            is_missed = is_guessed and not depth
            self.rows += 1
            self.rejected += num_accepted < depth
            self.accepted += self.lost_tokens if is_missed else num_accepted
            if not is_guessed:
                self.missed += 1 - self._token_rate if is_full else 1
                if seq_id in self._unguessed:
                    self.rows_after += 1
                    self.accepted_after += num_accepted
            self.missed += is_missed
            if not (is_full or is_missed):
                unguessed.append(seq_id)
        self._unguessed = frozenset(unguessed)

    def _decay(self, *, is_guessed: bool) -> None:
        self.rows *= _KEPT_ROWS
        self.missed *= _KEPT_ROWS
        self.accepted *= _KEPT_ROWS
        self.rejected *= _KEPT_ROWS
        if not is_guessed:
            self.rows_after *= _KEPT_ROWS
            self.accepted_after *= _KEPT_ROWS

    @property
    def _token_rate(self) -> float:
        """Estimated probability of the likeliest next token: that of a draft token."""
        return self.accepted / max(1.0, self.accepted + self.rejected)

    @property
    def lost_tokens(self) -> float:
        """Expected draft tokens of a row that is not guessed; until it is known, those of any."""
        mean = self.accepted / max(1.0, self.rows)
        return (self.accepted_after + mean) / (self.rows_after + 1)

    @property
    def lost_share(self) -> float:
        """Expected part of the tokens that is lost ahead."""
        return self.missed * self.lost_tokens / max(1.0, self.rows + self.accepted)


class AheadGain:
    """Estimates whether steps that begin ahead with guesses yield more tokens per second.

    The engine reports each step with drafts, and each attempt that finds no step to begin ahead.
    """

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}  # by the bit length of the number of rows
        self._outcomes = _Outcomes()
        self._num_ahead = 0  # steps since the last one that waited
        self._pause = self._num_paused = 0  # steps without an attempt, and how many are left

    def pays(self, num_rows: int) -> bool:
        """Return whether the step after one of `num_rows` is to begin ahead."""
        times = self._times.get(num_rows.bit_length())
        if times is None or self._num_paused or self._num_ahead >= _REFRESH_STEPS:
            return False
        return times.pays(self._outcomes.lost_share)

    def guessed(self, in_flight: Rows) -> Mapping[int, tuple[int, ...]] | None:
        """Return the drafts in flight, by sequence, where it pays to guess that all are accepted.

        Not of trees, whose tokens are no text, and for the coupled verifier alone, which yields the
        same tokens with a draft and without.
        """
        if not self.pays(len(in_flight)):
            return None
        for seq, row in in_flight:
            if row.drafting.parents is not None or seq.rules.acting_verifier != "coupled":
                self.note_failure()
                return None
        return {row.seq_id: row.drafts for _, row in in_flight}

    def note_failure(self) -> None:
        """Record that no step could begin ahead although it would pay."""
        self._pause = self._num_paused = min(max(1, 2 * self._pause), _MAX_PAUSE)

    def end_step(self, step: CollectedStep, *, is_guessed: bool, decodes_alone: bool) -> None:
        """Record a step for which drafts were wanted.

        is_guessed: whether they are guesses. decodes_alone: whether it had no part of a prompt.
        """
        seconds, idle_s = step.time
        if (idle_s is None) != is_guessed:
            return  # it began ahead because no draft was possible
        self._num_paused = max(0, self._num_paused - 1)
        self._num_ahead = self._num_ahead + 1 if is_guessed else 0
        if is_guessed:
            self._pause = 0
        if not decodes_alone:
            return
        times = self._times.setdefault(len(step.rows).bit_length(), _Times())
        if is_guessed or times.are_open:
            self._outcomes.add(step.rows, step.output.rows, is_guessed=is_guessed)
        if idle_s is not None:
            times.add_waited(seconds, idle_s)
            return
        was_trial = not _are_known(times.ahead)
        times.add_ahead(seconds)
        if was_trial and _are_known(times.ahead):
            times.end_trial(pays=times.pays(self._outcomes.lost_share))
