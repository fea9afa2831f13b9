"""Report of `specdec models show --drafters`: speeds of the drafters, and which one is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.cli.tables import aligned
from specdec.config.model_aliases import ShippedDrafter
from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.methods import METHODS
from specdec.llm.drafter_speeds import DrafterSpeeds

_PLACES = {DraftPlace.ENGINE: "engine", DraftPlace.TARGET: "target's ranks"}


@dataclass(frozen=True)
class DrafterRow:
    """A drafter. gain: speed over that without drafts; low, high: as in Gain."""

    name: str
    runs_in: str
    tokens_per_s: float
    gain: float
    low: float
    high: float
    is_chosen: bool


@dataclass(frozen=True)
class DrafterSpeedReport:
    """Speeds of the drafters of an alias, fastest first. notes: what else decided the choice."""

    plain_tokens_per_s: float
    num_rounds: int
    is_settled: bool
    rows: Sequence[DrafterRow]
    notes: Sequence[str]

    @classmethod
    def of(cls, drafters: Sequence[ShippedDrafter], speeds: DrafterSpeeds) -> DrafterSpeedReport:
        """Return the report of measured speeds."""
        chosen = speeds.choose(drafters)
        rows = [_row(each, speeds, is_chosen=each == chosen) for each in drafters]
        return cls(
            speeds.plain_tokens_per_s,
            len(speeds.plain),
            speeds.is_settled,
            sorted(rows, key=lambda row: -row.gain),
            list(_notes(drafters, speeds)),
        )

    def fields(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as a table."""
        heading = ["drafter", "runs in", "tokens/s", "gain", "rounds", ""]
        rows = [
            [
                row.name,
                row.runs_in,
                f"{row.tokens_per_s:.0f}",
                f"{row.gain:.2f}",
                f"{row.low:.2f} to {row.high:.2f}",
                "chosen" if row.is_chosen else "",
            ]
            for row in self.rows
        ]
        plain = ["no drafts", "", f"{self.plain_tokens_per_s:.0f}", "1.00", "", ""]
        title = f"expected speed of one stream, medians of {self.num_rounds} alternating rounds"
        return [title, *aligned([heading, *rows, plain]), *self.notes]


def _row(drafter: ShippedDrafter, speeds: DrafterSpeeds, *, is_chosen: bool) -> DrafterRow:
    gain = speeds.by_name[drafter.name]
    return DrafterRow(
        drafter.name,
        _PLACES[METHODS[drafter.method].place],
        gain.median * speeds.plain_tokens_per_s,
        gain.median,
        gain.low,
        gain.high,
        is_chosen,
    )


def _notes(drafters: Sequence[ShippedDrafter], speeds: DrafterSpeeds) -> Iterator[str]:
    """Yield what decided beside the speed."""
    chosen, contenders = speeds.choose(drafters), speeds.contenders
    if not speeds.is_settled:
        yield speeds.describe(chosen)
    elif len(contenders) > 1:
        yield f"{chosen.name} is the default of the equally fast {', '.join(contenders)}"
