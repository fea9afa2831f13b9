"""The page of a GPU check: what passed, the aims, step times, and what was skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.parts import PartReport
from benchmarks.report_file import markdown_table


def page(report: PartReport) -> str:
    """Return the report as Markdown."""
    plain = report.to_json()
    lines = [
        "# GPU check",
        "",
        f"`make gpu-check` on {plain['head']['device']}, torch {plain['head']['torch']}.",
        "",
        markdown_table(("part", "result", "seconds"), _part_rows(plain)),
    ]
    if aims := list(_aim_rows(plain["parts"])):
        lines += ["", "## Aims", "", markdown_table(("aim", "found", "limit", "result"), aims)]
    if cells := plain["parts"].get("grid", {}).get("cells"):
        rows = [_cell_row(each) for each in cells]
        columns = ("context", "batch", "drafts", "sampling", "ms", "floor, ms", "ratio")
        lines += ["", "## Steps of 8B", "", markdown_table(columns, rows)]
    return "\n".join(lines) + "\n"


def _part_rows(report: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, part in report["parts"].items():
        result = "passed" if part.get("passed", True) else f"failed {part.get('error', '')}".strip()
        yield name, result, str(part["seconds"])
    for name, reason in report["skipped"].items():
        yield name, f"skipped: {reason}", ""


def _aim_rows(parts: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for part in parts.values():
        for name, aim in part.get("aims", {}).items():
            value, limit = aim["value"], aim.get("at_most", aim.get("at_least"))
            is_met = value <= limit if "at_most" in aim else value >= limit
            sign = "at most" if "at_most" in aim else "at least"
            yield name, f"{value:.3g}", f"{sign} {limit:.3g}", "met" if is_met else "missed"


def _cell_row(cell: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(cell["context"]),
        str(cell["batch"]),
        str(cell["num_drafts"]),
        cell["rules"],
        f"{cell['step_ms']:.2f}",
        f"{cell['floor_ms']:.2f}",
        f"{cell['ratio']:.2f}",
    )
