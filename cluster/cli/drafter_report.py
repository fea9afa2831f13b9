"""Report of `specdec models show --drafters`: speeds of the drafters, and which one is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.cli.tables import aligned
from specdec.config.model_aliases import ShippedDrafter
from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.methods import METHODS
from specdec.llm.drafter_speeds import DrafterSpeeds

_PLACES = {DraftPlace.ENGINE: "engine", DraftPlace.TARGET: "target's ranks"}
_APART, _TOGETHER = "separate process", "process of LLM"
_USERS = {"service": False, "LLM": True}  # whether a draft model runs in the target's process


@dataclass(frozen=True)
class DrafterRow:
    """A drafter in a place, and what chooses it there.

    gain: speed over that without drafts; low, high: that of the rounds beside the median.
    """

    name: str
    runs_in: str
    tokens_per_s: float
    gain: float
    low: float
    high: float
    chosen_by: Sequence[str]


@dataclass(frozen=True)
class DrafterReport:
    """Speeds of the drafters of an alias, fastest first. notes: what else decided the choice."""

    plain_tokens_per_s: float
    num_rounds: int
    is_settled: bool
    rows: Sequence[DrafterRow]
    notes: Sequence[str]

    @classmethod
    def of(cls, drafters: Sequence[ShippedDrafter], speeds: DrafterSpeeds) -> DrafterReport:
        """Return the report of measured speeds."""
        rows = [row for each in drafters for row in _rows(each, drafters, speeds)]
        return cls(
            speeds.plain_tokens_per_s,
            len(speeds.plain),
            speeds.is_settled,
            sorted(rows, key=lambda row: -row.gain),
            list(dict.fromkeys(_notes(drafters, speeds))),
        )

    def fields(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as a table."""
        heading = ["drafter", "runs in", "tokens/s", "gain", "rounds", "chosen by"]
        rows = [
            [
                row.name,
                row.runs_in,
                f"{row.tokens_per_s:.0f}",
                f"{row.gain:.2f}",
                f"{row.low:.2f} to {row.high:.2f}",
                ", ".join(row.chosen_by),
            ]
            for row in self.rows
        ]
        plain = ["no drafts", "", f"{self.plain_tokens_per_s:.0f}", "1.00", "", ""]
        title = f"expected speed of one stream, medians of {self.num_rounds} alternating rounds"
        return [title, *aligned([heading, *rows, plain]), *self.notes]


def _rows(
    drafter: ShippedDrafter, drafters: Sequence[ShippedDrafter], speeds: DrafterSpeeds
) -> Iterator[DrafterRow]:
    """Yield a row for each place in which the drafter may run."""
    choices = {
        user: speeds.choose(drafters, in_process=in_process) for user, in_process in _USERS.items()
    }
    is_apart = drafter.name in speeds.apart
    for runs_in, users in _places(drafter, is_apart=is_apart).items():
        gain = speeds.by_name(in_process=_USERS[users[0]])[drafter.name]
        yield DrafterRow(
            drafter.name,
            runs_in,
            gain.median * speeds.plain_tokens_per_s,
            gain.median,
            gain.low,
            gain.high,
            [user for user in users if choices[user] == drafter],
        )


def _places(drafter: ShippedDrafter, *, is_apart: bool) -> Mapping[str, Sequence[str]]:
    """Return where a drafter runs, and for which users."""
    if is_apart:
        return {_APART: ["service"], _TOGETHER: ["LLM"]}
    return {_PLACES[METHODS[drafter.method].place]: list(_USERS)}


def _notes(drafters: Sequence[ShippedDrafter], speeds: DrafterSpeeds) -> Iterator[str]:
    """Yield what decided beside the speed."""
    if not speeds.is_settled:
        yield speeds.describe(drafters[0], in_process=False)
        return
    for in_process in _USERS.values():
        contenders = speeds.contenders(in_process=in_process)
        chosen = speeds.choose(drafters, in_process=in_process)
        if len(contenders) > 1:
            yield f"{chosen.name} has the least memory of the equally fast {', '.join(contenders)}"
