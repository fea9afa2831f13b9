"""Markdown page and chart of `benchmarks.control`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from xml.etree import ElementTree

_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT_HEIGHT = 760, 300, 60, 40, 200  # pixels
_LOW, _HIGH = 0.9, 1.1
_COLOURS = {"gpu": "#4878a8", "small gpu": "#c06030", "cpu": "#508050"}


class ControlResult(Protocol):
    """Fields of `benchmarks.control.Result` that the page shows."""

    @property
    def curve(self) -> str: ...
    @property
    def acceptance(self) -> str: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def best(self) -> int: ...
    @property
    def fixed_tokens_per_s(self) -> tuple[float, ...]: ...
    @property
    def auto_tokens_per_s(self) -> float: ...
    @property
    def chosen(self) -> dict[int, int]: ...
    @property
    def off_share(self) -> float: ...
    @property
    def best_share(self) -> float: ...


_ABOUT = (
    "Made by `make bench-control`; the figures are in [control.json](control.json). In simulated "
    "time, on synthetic targets with a set cost curve: reading the weights or computing the rows, "
    "whichever takes longer, a fifth of the other, and a part for each draft token. Every step "
    "varies by up to 5 %, and one in a hundred takes six times as long. *auto* is the default "
    "policy; *best k* the fixed number of draft tokens that was best on odd rounds, compared on "
    "even ones. Tokens a second, medians. The aim is that auto has at least {aim:.0%} of the best "
    "fixed number, and of off. What it makes of the demo model on a real service is in "
    "[service-control.md](service-control.md)."
)
_COLUMNS = (
    "target", "acceptance", "streams", "off", "best k", "at best k", "auto", "of best", "of off",
    "chosen most",
)  # fmt: skip


def page(results: Sequence[ControlResult], aim: float) -> str:
    """Return the page, with one row per case."""
    head = [
        "# What letting goodput decide loses",
        "",
        _ABOUT.format(aim=aim),
        "",
        "![auto against the best fixed number](control.svg)",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|" + "---|" * len(_COLUMNS),
        "",
    ]
    return "\n".join(head) + "".join(map(_row, results))


def _row(result: ControlResult) -> str:
    most = max(result.chosen, key=lambda count: result.chosen[count])
    cells = (
        result.curve,
        result.acceptance,
        str(result.num_streams),
        f"{result.fixed_tokens_per_s[0]:.0f}",
        str(result.best),
        f"{result.fixed_tokens_per_s[result.best]:.0f}",
        f"{result.auto_tokens_per_s:.0f}",
        f"{result.best_share:.3f}",
        f"{result.off_share:.3f}",
        str(most),
    )
    return f"| {' | '.join(cells)} |\n"


def plot(results: Sequence[ControlResult], aim: float) -> str:
    """Return a scatter plot of auto's share of the best by number of streams, as SVG."""
    streams = sorted({each.num_streams for each in results})
    root = ElementTree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        attrib={"font-family": "sans-serif", "font-size": "13"},
    )
    ElementTree.SubElement(root, "rect", width="100%", height="100%", fill="white")
    _text(root, 12, 22, "auto / best fixed number of draft tokens, by streams")
    for share, dash in ((aim, "6 4"), (1.0, "")):
        _line(root, _y(share), f"{share:.2f}", dash)
    for place, size in enumerate(streams):
        _text(root, _x(place, len(streams)) - 8, _TOP + _PLOT_HEIGHT + 24, str(size))
    for each in results:
        place = streams.index(each.num_streams)
        offset = 9 * (list(_COLOURS).index(each.curve) - 1)
        ElementTree.SubElement(
            root,
            "circle",
            cx=f"{_x(place, len(streams)) + offset:.1f}",
            cy=f"{_y(each.best_share):.1f}",
            r="4",
            fill=_COLOURS[each.curve],
        )
    for index, (curve, colour) in enumerate(_COLOURS.items()):
        left = _LEFT + 120 * index
        ElementTree.SubElement(
            root, "circle", cx=f"{left}", cy=f"{_HEIGHT - 18}", r="4", fill=colour
        )
        _text(root, left + 10, _HEIGHT - 14, curve)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _x(place: int, count: int) -> float:
    return _LEFT + 40 + (_WIDTH - _LEFT - 80) * place / max(1, count - 1)


def _y(share: float) -> float:
    kept = min(_HIGH, max(_LOW, share))
    return _TOP + _PLOT_HEIGHT * (_HIGH - kept) / (_HIGH - _LOW)


def _line(root: ElementTree.Element, y: float, label: str, dash: str) -> None:
    style = {"stroke-dasharray": dash} if dash else {}
    ElementTree.SubElement(
        root,
        "line",
        x1=f"{_LEFT}",
        x2=f"{_WIDTH - 20}",
        y1=f"{y:.1f}",
        y2=f"{y:.1f}",
        stroke="#888",
        attrib=style,
    )
    _text(root, 12, y + 4, label)


def _text(root: ElementTree.Element, x: float, y: float, text: str) -> None:
    ElementTree.SubElement(root, "text", x=f"{x:.1f}", y=f"{y:.1f}").text = text
