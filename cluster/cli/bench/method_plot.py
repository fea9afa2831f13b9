"""Bar chart of the results of `specdec bench methods`, as SVG."""

from __future__ import annotations

from cluster.cli.bench.methods import MethodReport, MethodResult
from cluster.cli.svg import Drawing, Point

_WIDTH, _BAR_WIDTH, _LEFT, _TOP, _ROW = 720, 380, 130, 48, 28  # pixels
_COLOUR = "#4878a8"


def svg(report: MethodReport) -> str:
    """Draw one bar per method for its tokens per second."""
    drawing = Drawing(_WIDTH, _TOP + _ROW * len(report.results) + 12)
    title = f"{report.model}: tokens per second, median of {report.num_prompts} prompts"
    drawing.text(Point(12, 26), title)
    fastest = max((result.tokens_per_s or 0 for result in report.results), default=0) or 1
    for row, result in enumerate(report.results):
        _bar(drawing, _TOP + _ROW * row, result, fastest)
    return drawing.markup()


def _bar(drawing: Drawing, top: int, result: MethodResult, fastest: float) -> None:
    rate = result.tokens_per_s or 0
    width = _BAR_WIDTH * rate / fastest
    drawing.text(Point(12, top + 16), result.name)
    drawing.bar(Point(_LEFT, top), width, 22, _COLOUR)
    figures = f"{rate:.1f}"
    if result.num_drafts:
        figures += f", {result.mean_acceptance_length:.2f} tokens per draft"
    drawing.text(Point(_LEFT + width + 8, top + 16), figures)
