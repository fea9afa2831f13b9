"""Line and bar charts as SVG, drawn by matplotlib (the extra `specdec[plot]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specdec.types.errors import SpecdecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIN_WIDTH, _HEIGHT = 7.6, 3.4  # inches, of one chart
_BAR_WIDTH = 0.18  # inches


class MissingLibraryError(SpecdecError):
    """An optional library is not installed; the message names the extra."""


@dataclass(frozen=True)
class LineChart:
    """Lines over a logarithmic x axis. series: by name, the y value of each `x`; NaN is skipped."""

    title: str
    x_label: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float]]

    width = _MIN_WIDTH

    def draw(self, axes: Axes) -> None:
        """Draw the lines, with a tick at each x."""
        for name, y in self.series.items():
            axes.plot(self.x, y, marker=".", label=name, gid=f"{self.title}: {name}")
        axes.set_xscale("log")
        axes.set_xticks(self.x, [f"{x:g}" for x in self.x])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(self.x_label)


@dataclass(frozen=True)
class BarChart:
    """Groups of bars. groups: by group name, the value of each bar by its name."""

    title: str
    groups: Mapping[str, Mapping[str, float]]

    @property
    def width(self) -> float:
        """Width of the figure in inches."""
        return max(_MIN_WIDTH, _BAR_WIDTH * (len(self._names) + 1) * len(self.groups) + 3)

    def draw(self, axes: Axes) -> None:
        """Draw the groups from left to right; each value stands on its bar if groups have one."""
        width = 0.9 / len(self._names)
        for column, name in enumerate(self._names):
            x = [group + width * column for group in range(len(self.groups))]
            values = [group.get(name, 0.0) for group in self.groups.values()]
            bars = axes.bar(x, values, 0.9 * width, label=name)
            if len(self._names) == 1:
                axes.bar_label(bars, fmt="%.1f")
        middle = width * (len(self._names) - 1) / 2
        axes.set_xticks([group + middle for group in range(len(self.groups))], list(self.groups))

    @property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for group in self.groups.values() for name in group))


def draw_charts(charts: Sequence[LineChart | BarChart]) -> str:
    """Draw the charts below each other; the same charts give the same SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    width = max((chart.width for chart in charts), default=_MIN_WIDTH)
    # Text stays text, without formulas between dollar signs; the salt makes ids reproducible.
    with mpl.rc_context(
        {"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "specdec"}
    ):
        figure = Figure((width, _HEIGHT * max(len(charts), 1)), layout="constrained")
        for row, chart in enumerate(charts, start=1):
            axes = figure.add_subplot(len(charts), 1, row)
            chart.draw(axes)
            axes.set_title(chart.title, loc="left", fontsize="medium")
            if axes.dataLim.y0 >= 0:
                axes.set_ylim(bottom=0)
            axes.grid(axis="y", alpha=0.4)
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        svg = StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()


def require_matplotlib(
    ctx: click.Context, param: click.Parameter, path: Path | None
) -> Path | None:
    """Return the value of --plot; raise MissingLibraryError if nothing can draw the charts."""
    if path is not None and find_spec("matplotlib") is None:
        raise MissingLibraryError("--plot needs matplotlib; install specdec[plot]")
    return path
