"""Target and draft model without weights, on a simulated clock, for the real engine.

The text of a sequence is random and fixed in advance, and so is the rank of each of its tokens in
the draft model's order: 0, which an accurate draft model has, with the probability `acceptance`.
Passes take the time that the speeds give; each model has its own device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.types.draft_messages import (
    AheadDraft,
    AheadOutput,
    AheadRow,
    Continuation,
    DraftedRow,
    DraftOutput,
    DraftPass,
    DraftRow,
    DraftStep,
)
from specdec.types.messages import StepInput, StepRow, VerifiedRow, VerifyOutput

_FIRST_TOKEN, _NUM_TOKENS = 2, 200
_MAX_RANK = 64
_ROUNDING_S = 1e-9
"""Two devices that end at the same time end together, whatever the rounding of sums of seconds."""
_TEXT_TOKENS = 1 << 15
_FREE_TOKENS = 256


class SimulatedClock:
    """Time in seconds, which passes where a model is waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the present time."""
        return self.now_s

    def wait_until(self, at_s: float) -> None:
        """Let time pass; a time in the past has no effect."""
        self.now_s = max(self.now_s, at_s)


@dataclass(frozen=True)
class Speeds:
    """Seconds of forward passes that read the weights.

    A pass of more than `_FREE_TOKENS` tokens takes longer, in proportion to them.
    """

    target_s: float
    draft_s: float

    def of_target(self, num_tokens: int) -> float:
        """Return the seconds of a pass of the target."""
        return self.target_s * max(1.0, num_tokens / _FREE_TOKENS)

    def of_draft(self, num_tokens: int) -> float:
        """Return the seconds of a pass of the draft model."""
        return self.draft_s * max(1.0, num_tokens / _FREE_TOKENS)


class _Text(NamedTuple):
    """One sequence by position. drafted: the draft model's first tokens."""

    tokens: list[int]
    ranks: list[int]
    drafted: list[int]


@dataclass(frozen=True)
class Texts:
    """The tokens of all sequences, and their ranks in the draft model's order.

    rank_exponent: a token that is not the draft model's first has rank r with a probability in
    proportion to r ** -rank_exponent.
    """

    acceptance: float
    rank_exponent: float
    _made: dict[int, _Text] = field(default_factory=dict)

    def token(self, seq_id: int, position: int) -> int:
        """Return the token at a position."""
        return self._of(seq_id).tokens[position]

    def drafted(self, seq_id: int, position: int, count: int) -> tuple[int, ...]:
        """Return the draft model's first tokens at consecutive positions."""
        return tuple(self._of(seq_id).drafted[position : position + count])

    def candidates(self, seq_id: int, position: int, count: int) -> list[int]:
        """Return the draft model's first tokens at a position, the likeliest first."""
        text = self._of(seq_id)
        true, rank = text.tokens[position], text.ranks[position]
        others = range(true - 1, true - 1 + count)
        found = [_FIRST_TOKEN + other % _NUM_TOKENS for other in others]
        if rank < count:
            found[rank] = true
        return found

    @cached_property
    def rank_probabilities(self) -> NDArray[np.float64]:
        """Probability of each rank from 0 on."""
        weights = np.arange(1, _MAX_RANK) ** -self.rank_exponent
        rest = (1 - self.acceptance) * weights / weights.sum()
        return np.concatenate([[self.acceptance], rest])

    def _of(self, seq_id: int) -> _Text:
        if seq_id not in self._made:
            generator = np.random.default_rng((0, seq_id))
            tokens = _FIRST_TOKEN + generator.integers(0, _NUM_TOKENS, _TEXT_TOKENS)
            ranks = generator.choice(_MAX_RANK, _TEXT_TOKENS, p=self.rank_probabilities)
            wrong = _FIRST_TOKEN + (tokens - 1) % _NUM_TOKENS
            drafted = np.where(ranks == 0, tokens, wrong)
            self._made[seq_id] = _Text(tokens.tolist(), ranks.tolist(), drafted.tolist())
        return self._made[seq_id]


class SimulatedTarget:
    """Target on its own device; see `specdec.types.ranks.Target`.

    busy_s: seconds of its passes.
    """

    def __init__(self, clock: SimulatedClock, speeds: Speeds, texts: Texts) -> None:
        self._clock = clock
        self._speeds = speeds
        self._texts = texts
        self._steps: deque[tuple[StepInput, float]] = deque()
        self._free_at_s = 0.0
        self.busy_s = 0.0

    def begin(self, step: StepInput) -> None:
        """Run the step after the earlier ones."""
        seconds = self._speeds.of_target(sum(len(row.token_ids) for row in step.rows))
        self._free_at_s = max(self._free_at_s, self._clock()) + seconds
        self.busy_s += seconds
        self._steps.append((step, self._free_at_s))

    def collect(self) -> VerifyOutput:
        """Wait for the oldest step."""
        step, ends_at_s = self._steps.popleft()
        self._clock.wait_until(ends_at_s)
        rows = tuple(self._verified(row) for row in step.rows if row.samples)
        return VerifyOutput(step.step_id, rows)

    def _verified(self, row: StepRow) -> VerifiedRow:
        tokens = [self._texts.token(row.seq_id, row.known_end)]
        while len(row.accepted_drafts(tokens)) == len(tokens):
            tokens.append(self._texts.token(row.seq_id, row.known_end + len(tokens)))
        return VerifiedRow(row.seq_id, tuple(tokens))


@dataclass
class _Enumeration:
    """Drafts ahead that are being made. ends_at_s: of each pass."""

    step: DraftStep
    passes: list[DraftPass]
    ends_at_s: list[float]

    @property
    def num_levels(self) -> int:
        """Tokens after each outcome."""
        return len(self.passes) - 1

    def interrupt(self, at_s: float) -> None:
        """Drop the passes that have not begun; the first one always runs."""
        running = next(index for index, end_s in enumerate(self.ends_at_s) if end_s > at_s)
        del self.passes[running + 1 :], self.ends_at_s[running + 1 :]


class SimulatedDraftWorker:
    """Draft model on its own device; see `specdec.types.ranks.DraftWorker`.

    num_waits: how often `collect` was called, for drafts that a step waits for.
    """

    def __init__(self, clock: SimulatedClock, speeds: Speeds, texts: Texts) -> None:
        self._clock = clock
        self._speeds = speeds
        self._texts = texts
        self._free_at_s = self._caught_up_at_s = self._drafted_at_s = 0.0
        self._drafts: DraftStep | None = None
        self._enumerations: deque[_Enumeration] = deque()
        self.num_waits = 0
        self.busy_s = 0.0

    def begin(self, step: DraftStep) -> None:
        """Run the step, after the pass of an earlier one that runs now."""
        self._interrupt()
        if step.drafts:
            self._drafts = step
            most = max(row.num_draft_tokens for row in step.drafts)
            sizes = [sum(len(row.token_ids) for row in step.drafts)]
            for index in range(1, most):
                sizes.append(sum(row.num_draft_tokens > index for row in step.drafts))
            self._run(sum(map(self._speeds.of_draft, sizes)))
            self._drafted_at_s = self._free_at_s
        if step.rows:
            self._run(self._speeds.of_draft(sum(len(row.token_ids) for row in step.rows)))
            self._caught_up_at_s = self._free_at_s
        if step.ahead:
            self._enumerate(step)

    def collect(self) -> DraftOutput:
        """Wait for the drafts of the last step that has some."""
        assert self._drafts is not None, "collect without drafts"
        self.num_waits += 1
        self._clock.wait_until(self._drafted_at_s)
        return DraftOutput(self._drafts.step_id, tuple(map(self._drafted, self._drafts.drafts)))

    def collect_ahead(self, *, wait: bool) -> list[AheadOutput]:
        """Return the drafts ahead that are complete, or with `wait` all of them."""
        if wait and self._enumerations:
            self._clock.wait_until(self._enumerations[-1].ends_at_s[-1])
        outputs = []
        while self._enumerations and self._is_over(self._enumerations[0]):
            outputs.append(self._output(self._enumerations.popleft()))
        return outputs

    def poll_busy(self) -> bool:
        """Return whether text to catch up on is still running."""
        return self._caught_up_at_s > self._clock()

    def _run(self, seconds: float) -> float:
        self._free_at_s = max(self._free_at_s, self._clock()) + seconds
        self.busy_s += seconds
        return seconds

    def _enumerate(self, step: DraftStep) -> None:
        num_first = sum(len(row.token_ids) for row in step.ahead)
        passes = [DraftPass(num_first, self._run(self._speeds.of_draft(num_first)))]
        ends_at_s = [self._free_at_s]
        for index in range(max(row.num_draft_tokens for row in step.ahead)):
            rows = [row for row in step.ahead if row.num_draft_tokens > index]
            num_tokens = sum(sum(row.fan_out) for row in rows)
            passes.append(DraftPass(num_tokens, self._run(self._speeds.of_draft(num_tokens))))
            ends_at_s.append(self._free_at_s)
        self._enumerations.append(_Enumeration(step, passes, ends_at_s))

    def _interrupt(self) -> None:
        if not self._enumerations or self._is_over(self._enumerations[-1]):
            return
        last = self._enumerations[-1]
        before_s = sum(each.seconds for each in last.passes)
        last.interrupt(self._clock())
        self.busy_s -= before_s - sum(each.seconds for each in last.passes)
        self._free_at_s = last.ends_at_s[-1]

    def _is_over(self, made: _Enumeration) -> bool:
        return made.ends_at_s[-1] <= self._clock() + _ROUNDING_S

    def _drafted(self, row: DraftRow) -> DraftedRow:
        end = row.num_computed_tokens + len(row.token_ids)
        return DraftedRow(row.seq_id, self._texts.drafted(row.seq_id, end, row.num_draft_tokens))

    def _output(self, made: _Enumeration) -> AheadOutput:
        drafts = tuple(
            AheadDraft(row.seq_id, tuple(self._continuations(row, made.num_levels)))
            for row in made.step.ahead
        )
        return AheadOutput(made.step.step_id, drafts, tuple(made.passes))

    def _continuations(self, row: AheadRow, num_levels: int) -> list[Continuation]:
        found, count = [], min(num_levels, row.num_draft_tokens)
        for num_accepted, width in enumerate(row.fan_out):
            position = row.num_known_tokens + num_accepted
            for token in self._outcomes(row, num_accepted, position, width):
                drafted = self._texts.drafted(row.seq_id, position + 1, count)
                found.append(Continuation(num_accepted, token, drafted))
        return found

    def _outcomes(
        self, row: AheadRow, num_accepted: int, position: int, width: int
    ) -> Sequence[int]:
        drafted = row.drafts[num_accepted : num_accepted + 1]
        candidates = self._texts.candidates(row.seq_id, position, width + 1)
        return [token for token in candidates if token not in drafted][:width]
