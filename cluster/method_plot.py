"""A bar chart of what `specdec bench methods` measured, as SVG: no plotting library is needed."""

from __future__ import annotations

from xml.etree import ElementTree

from cluster.method_bench import MethodReport, MethodResult

_WIDTH, _BAR_WIDTH, _LEFT, _TOP, _ROW = 720, 380, 130, 48, 28  # pixels


def svg(report: MethodReport) -> str:
    """A bar a method, as long as its tokens per second, with its figures beside it."""
    height = _TOP + _ROW * len(report.results) + 12
    root = ElementTree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {height}",
        attrib={"font-family": "sans-serif", "font-size": "13"},
    )
    ElementTree.SubElement(root, "rect", width="100%", height="100%", fill="white")
    title = f"{report.model}: tokens per second, median of {report.num_prompts} prompts"
    _text(root, 12, 26, title)
    fastest = max((result.tokens_per_s or 0 for result in report.results), default=0) or 1
    for place, result in enumerate(report.results):
        _bar(root, _TOP + _ROW * place, result, fastest)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _bar(root: ElementTree.Element, top: int, result: MethodResult, fastest: float) -> None:
    rate = result.tokens_per_s or 0
    width = _BAR_WIDTH * rate / fastest
    _text(root, 12, top + 16, result.name)
    ElementTree.SubElement(
        root, "rect", x=f"{_LEFT}", y=f"{top}", width=f"{width:.1f}", height="22", fill="#4878a8"
    )
    figures = f"{rate:.1f}"
    if result.num_drafts:
        figures += f", {result.mean_acceptance_length:.2f} tokens a draft"
    _text(root, _LEFT + width + 8, top + 16, figures)


def _text(root: ElementTree.Element, x: float, y: float, text: str) -> None:
    ElementTree.SubElement(root, "text", x=f"{x:.1f}", y=f"{y:.1f}").text = text
