"""Rows of the dashboard and their panels: a title, a meaning, queries, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tools.monitoring.queries import Query

Unit = Literal["short", "percentunit", "s", "reqps", "tokens/s", "steps/s", "x"]
Kind = Literal["stat", "lines", "stacked"]


@dataclass(frozen=True)
class Panel:
    """Panel of the dashboard. most: the maximum of its axis; None adapts it to the values."""

    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: Unit = "short"
    kind: Kind = "lines"
    most: float | None = None


@dataclass(frozen=True)
class Row:
    """Row of related panels."""

    title: str
    panels: tuple[Panel, ...]
