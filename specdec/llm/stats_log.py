"""One line now and then of what an engine did, where its caller wants that."""

from __future__ import annotations

import logging
from collections.abc import Callable

from specdec.types.stats import EngineStats, SpeculationStats

logger = logging.getLogger(__name__)

_PERIOD_S = 10.0


class StatsLog:
    """Writes at level INFO what was done since the line before, as requests end."""

    def __init__(self, is_wanted: bool, clock: Callable[[], float]) -> None:
        """is_wanted: False writes nothing."""
        self._is_wanted = is_wanted
        self._clock = clock
        self._at_s = clock()
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._speculation = SpeculationStats()

    def note(self, stats: EngineStats) -> None:
        """To be called when a request has ended. Writes if the last line is ten seconds old."""
        if self._is_wanted and self._clock() - self._at_s >= _PERIOD_S:
            self.write(stats)

    def begin(self, stats: EngineStats) -> None:
        """Has the next line tell of what comes from now on."""
        self._at_s = self._clock()
        self._num_prompt_tokens = stats.num_prompt_tokens
        self._num_generated_tokens = stats.num_generated_tokens
        self._speculation = stats.speculation

    def write(self, stats: EngineStats) -> None:
        """Writes now, if there is anything new."""
        if not self._is_wanted or stats.num_generated_tokens == self._num_generated_tokens:
            return
        seconds = max(self._clock() - self._at_s, 1e-9)
        drafts = stats.speculation.minus(self._speculation)
        logger.info(
            "prompts %.1f tokens/s, answers %.1f tokens/s, %d running, %d waiting, "
            "acceptance rate %.0f%%, mean acceptance length %.2f",
            (stats.num_prompt_tokens - self._num_prompt_tokens) / seconds,
            (stats.num_generated_tokens - self._num_generated_tokens) / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * drafts.acceptance_rate,
            drafts.mean_acceptance_length,
        )
        self.begin(stats)
