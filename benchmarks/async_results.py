"""Results of `benchmarks.async_simulation`, by case and mode of drafting."""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("none", "synchronous", "continuing", "outcomes", "auto")


@dataclass(frozen=True)
class Case:
    """Ratio of the draft model's pass to the target's, acceptance, and concurrent streams."""

    ratio: float
    acceptance: float
    num_streams: int


@dataclass(frozen=True)
class ModeResult:
    """Results of a mode in a case.

    hit_rate: part of the rows with a draft that was made ahead. wasted: part of the tokens drafted
        ahead that were not sent to the target. draft_use: part of the time in which the draft
        model's device runs. num_waits: steps that waited for the draft model.
    """

    tokens_per_s: float
    hit_rate: float = 0.0
    wasted: float = 0.0
    draft_use: float = 0.0
    num_waits: int = 0


@dataclass(frozen=True)
class CaseResult:
    """One case, by mode."""

    case: Case
    modes: dict[str, ModeResult]

    def speed(self, mode: str) -> float:
        """Return the tokens per second of a mode."""
        return self.modes[mode].tokens_per_s

    def over_synchronous(self, mode: str) -> float:
        """Return the speed of a mode over that of synchronous drafting."""
        return self.speed(mode) / self.speed("synchronous")

    @property
    def auto_share(self) -> float:
        """Auto's speed over that of the best mode."""
        return self.speed("auto") / max(self.speed(mode) for mode in MODES if mode != "auto")
