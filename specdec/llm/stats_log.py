"""Periodic log line with the throughput of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

from specdec.types.stats import Counts, EngineStats

logger = logging.getLogger(__name__)

_PERIOD_S = 10.0


class StatsLog:
    """Logs at level INFO, as requests end, what was done since the previous line."""

    def __init__(self, is_enabled: bool, clock: Callable[[], float]) -> None:
        self._is_enabled = is_enabled
        self._clock = clock
        self._at_s = clock()
        self._before = Counts()

    def note(self, stats: EngineStats) -> None:
        """Log if the last line is ten seconds old. Call it when a request has ended."""
        if self._is_enabled and self._clock() - self._at_s >= _PERIOD_S:
            self.write(stats)

    def begin(self, stats: EngineStats) -> None:
        """Start the period of the next line."""
        self._at_s, self._before = self._clock(), stats.counts

    def write(self, stats: EngineStats) -> None:
        """Log now, if anything was generated."""
        if not self._is_enabled:
            return
        new = stats.counts.minus(self._before)
        if not new.num_generated_tokens:
            return
        seconds = max(self._clock() - self._at_s, 1e-9)
        logger.info(
            "prompts %.1f tokens/s, answers %.1f tokens/s, %d running, %d waiting, "
            "acceptance rate %.0f%%, mean acceptance length %.2f",
            new.num_prompt_tokens / seconds,
            new.num_generated_tokens / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * new.speculation.acceptance_rate,
            new.speculation.mean_acceptance_length,
        )
        self.begin(stats)
