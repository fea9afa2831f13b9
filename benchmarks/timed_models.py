"""Target and draft worker that measure their passes, and what the engine waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from specdec.types.draft_messages import AheadOutput, AheadRow, DraftOutput, DraftStep
from specdec.types.messages import StepInput, VerifyOutput
from specdec.types.ranks import DraftWorker, Target

_MOST_ROWS = 40
"""Tokens of the largest pass that verifies one sequence; others compute a prompt."""


@dataclass
class MeanTimes:
    """Mean seconds of passes by their number of tokens."""

    sums: dict[int, tuple[int, float]] = field(default_factory=dict)  # passes, seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a pass."""
        count, total = self.sums.get(num_tokens, (0, 0.0))
        self.sums[num_tokens] = count + 1, total + seconds

    @property
    def num_passes(self) -> int:
        """All passes."""
        return sum(count for count, _ in self.sums.values())

    def seconds(self, num_tokens: int) -> float:
        """Return the mean, between and beyond the observed sizes by the line through all passes.

        Raises AssertionError before the first pass.
        """
        assert self.sums, "no pass was observed"
        if num_tokens in self.sums:
            count, total = self.sums[num_tokens]
            return total / count
        sizes = np.array(list(self.sums), dtype=float)
        counts, totals = np.array(list(self.sums.values())).T
        if len(sizes) == 1:
            return float(totals[0] / counts[0])
        slope, first = np.polyfit(sizes, totals / counts, 1, w=np.sqrt(counts))
        return float(max(0.0, first + slope * num_tokens))

    def means(self) -> dict[int, float]:
        """Return the mean seconds by number of tokens, ascending."""
        return {size: round(self.seconds(size), 6) for size in sorted(self.sums)}


@dataclass
class ModelTimes:
    """Times of both models in runs of one kind.

    target: passes that verify. synchronous: a draft that a step waits for, message included, by its
        number of tokens. first, levels: passes of drafts ahead, those over drafts in flight and
        those that extend branches. messages: what drafts ahead take besides those passes, of those
        that were waited for. waited_s: for the draft worker. host_s: steps without the passes of
        the target and that wait; num_steps.
    """

    target: MeanTimes = field(default_factory=MeanTimes)
    synchronous: MeanTimes = field(default_factory=MeanTimes)
    first: MeanTimes = field(default_factory=MeanTimes)
    levels: MeanTimes = field(default_factory=MeanTimes)
    messages: MeanTimes = field(default_factory=MeanTimes)
    waited_s: float = 0.0
    host_s: float = 0.0
    num_steps: int = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step of the engine: the host's part is what the models leave of it."""
        before_s, began_at_s = self._models_s, time.perf_counter()
        yield
        self.host_s += time.perf_counter() - began_at_s - (self._models_s - before_s)
        self.num_steps += 1

    @property
    def host_step_s(self) -> float:
        """Mean seconds of the host in a step."""
        return self.host_s / max(1, self.num_steps)

    @property
    def _models_s(self) -> float:
        return self.waited_s + sum(total for _, total in self.target.sums.values())


class TimedTarget:
    """A target in this process, which runs a step when it is collected. times: to record in."""

    def __init__(self, target: Target, times: ModelTimes) -> None:
        self.target = target
        self.times = times
        self._sizes: list[int] = []

    def begin(self, step: StepInput) -> None:
        """Pass on a step."""
        self._sizes.append(sum(len(row.token_ids) for row in step.rows))
        self.target.begin(step)

    def collect(self) -> VerifyOutput:
        """Run the oldest step."""
        began_at_s = time.perf_counter()
        output = self.target.collect()
        if (size := self._sizes.pop(0)) <= _MOST_ROWS:
            self.times.target.observe(size, time.perf_counter() - began_at_s)
        return output


class TimedWorker:
    """A draft worker. times: to record in. rounds: the rows that were drafted after, in order."""

    def __init__(self, worker: DraftWorker, times: ModelTimes) -> None:
        self.times = times
        self.rounds: list[AheadRow] = []
        self._worker = worker
        self._began: tuple[int, float] | None = None  # draft tokens and time of the last draft
        self._sent_at_s: dict[int, float] = {}  # drafts ahead, by step

    def begin(self, step: DraftStep) -> None:
        """Pass on a step."""
        self.rounds += step.ahead
        if step.drafts:
            most = max(row.num_draft_tokens for row in step.drafts)
            self._began = most, time.perf_counter()
        if step.ahead:
            self._sent_at_s[step.step_id] = time.perf_counter()
        self._worker.begin(step)

    def collect(self) -> DraftOutput:
        """Wait for the drafts of the last step that has some."""
        began_at_s = time.perf_counter()
        output = self._worker.collect()
        now_s = time.perf_counter()
        assert self._began is not None, "collect without drafts"
        num_tokens, sent_s = self._began
        self.times.synchronous.observe(num_tokens, now_s - sent_s)
        self.times.waited_s += now_s - began_at_s
        return output

    def collect_ahead(self, *, wait: bool) -> list[AheadOutput]:
        """Return drafts ahead, and record their passes."""
        began_at_s = time.perf_counter()
        outputs = self._worker.collect_ahead(wait=wait)
        now_s = time.perf_counter()
        if wait:
            self.times.waited_s += now_s - began_at_s
        for output in outputs:
            sent_at_s = self._sent_at_s.pop(output.step_id)
            if wait and output.is_whole:
                passes_s = sum(each.seconds for each in output.passes)
                self.times.messages.observe(1, now_s - sent_at_s - passes_s)
            for index, each in enumerate(output.passes):
                times = self.times.levels if index else self.times.first
                times.observe(each.num_tokens, each.seconds)
        return outputs

    def poll_busy(self) -> bool:
        """See the worker."""
        return self._worker.poll_busy()
