"""The page of a GPU check: what passed, the aims, step times, and what was skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu import service
from benchmarks.gpu.parts import PartReport, Result
from benchmarks.report_file import markdown_table

_AIM_COLUMNS = ("aim", "part", "found", "limit", "result")
_PROMPT_COLUMNS = (
    *("batch", "drafts", "prompt"),
    *("ms without prompt", "ms on the device", "ms by the host"),
)
_TREE_COLUMNS = (
    *("batch", "context", "drafts"),
    *("ms as a chain", "ms as a tree, on the device", "ms by the host"),
)
_EXTRAS_PART = "penalties, grammars, log-probabilities"
_EXTRAS_COLUMNS = ("batch", "request", "sequences with it", "ms on the device", "ms by the host")
_SPECULATION_COLUMNS = (
    *("batch", "tokens/s without drafts", "5 drafts, times these"),
    *("the policy's drafts, times these", "drafts a sequence and step by the policy"),
)
_SUM_COLUMNS = ("type", "KiB", "in one shot, us", "NCCL, us")


def page(report: PartReport) -> str:
    """Return the report as Markdown."""
    plain = report.to_json()
    others = _other_parts(plain)
    passed = [name for name, each in plain["parts"].items() if each.get("passed", True)]
    lines = [
        "# GPU check",
        "",
        f"`make gpu-check` on {plain['head']['device']}, torch {plain['head']['torch']}.",
        "",
        f"Passed: {', '.join(passed) or 'none'}.",
    ]
    sections = ("Other parts", ("part", "result"), others), *_sections(plain["parts"])
    for title, columns, rows in sections:
        if rows:
            lines += ["", f"## {title}", "", markdown_table(columns, rows)]
    return "\n".join(lines) + "\n"


def _sections(parts: dict[str, Any]) -> Iterator[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    """Yield the title, columns and rows of each table; without rows if nothing was measured."""

    def cells(part: str, key: str) -> Any:
        return parts.get(part, {}).get(key) or ()

    yield "Aims", _AIM_COLUMNS, list(_aim_rows(parts))
    yield "Sums over two ranks", _SUM_COLUMNS, list(map(_sum_row, cells("ranks", "sums")))
    prompts = _timed_rows(cells("prompts", "prompt_cells"))
    yield "Steps of 8B with a prompt", _PROMPT_COLUMNS, prompts
    yield "Steps of 8B with trees", _TREE_COLUMNS, _timed_rows(cells("trees", "tree_cells"))
    title = "Steps of 8B with 4 drafts, by requests of some sequences"
    yield title, _EXTRAS_COLUMNS, _timed_rows(cells(_EXTRAS_PART, "extras_cells"))
    steps = _step_table(cells("main steps", "cells"))
    yield "Milliseconds of a step of 8B with k drafts (the grid is in the JSON)", *steps
    speculation = parts.get("speculation", {})
    yield "Speculation", _SPECULATION_COLUMNS, list(_speculation_rows(speculation))
    yield "Engine, service, peer", service.COLUMNS, list(service.rows(parts))


def _other_parts(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the parts that failed or were skipped, with the reason."""
    failed = {name: each for name, each in report["parts"].items() if not each.get("passed", True)}
    rows = [(name, f"failed {each.get('error', '')}") for name, each in failed.items()]
    rows += [(name, f"skipped: {reason}") for name, reason in report["skipped"].items()]
    return [(name, _cell(result.strip())) for name, result in rows]


def _cell(text: str) -> str:
    """Return the first line of a text, as a cell of a table holds it."""
    return text.splitlines()[0].replace("|", "\\|")


def _aim_rows(parts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield aims in `_AIM_COLUMNS`; several parts may measure the same one."""
    for part_name, part in parts.items():
        for name, aim in part.get("aims", {}).items():
            value, limit = aim["value"], aim.get("at_most", aim.get("at_least"))
            is_met = value <= limit if "at_most" in aim else value >= limit
            sign = "at most" if "at_most" in aim else "at least"
            result = "met" if is_met else "missed"
            yield name, part_name, f"{value:.3g}", f"{sign} {limit:.3g}", result


def _sum_row(each: dict[str, Any]) -> tuple[str, ...]:
    times = (f"{each[key]:.1f}" for key in ("one_shot_us", "nccl_us"))
    return (each["dtype"], str(each["bytes"] // 2**10), *times)


def _timed_rows(cells: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the values of cells in the order of their fields, of which `*_ms` are times."""
    return [
        tuple(f"{value:.2f}" if key.endswith("_ms") else str(value) for key, value in cell.items())
        for cell in cells
    ]


def _step_table(
    cells: Sequence[dict[str, Any]],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows of steps, with a column for each number of drafts."""
    counts = sorted({cell["num_drafts"] for cell in cells})
    names = ("sampling", "context", "batch", "memory floor", "k = 0, begun ahead")
    found: dict[tuple[str, int, int], dict[int, dict[str, Any]]] = {}
    for cell in cells:
        key = (cell["rules"], cell["context"], cell["batch"])
        found.setdefault(key, {})[cell["num_drafts"]] = cell
    rows = []
    for (rules, context, batch), steps in sorted(found.items()):
        ahead_ms = steps[0]["ahead_ms"] if 0 in steps else None
        floor_ms = next(iter(steps.values()))["floor_ms"]
        times = (steps[count]["step_ms"] if count in steps else None for count in counts)
        rows.append((rules, str(context), str(batch), *map(_ms, (floor_ms, ahead_ms, *times))))
    return (*names, *(f"k = {count}" for count in counts)), rows


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _speculation_rows(part: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for batch, ratio in part.get("policy_ratios", {}).items():
        rates = part["rates"]
        plain, policy = rates["none"][batch], rates["policy"][batch]
        yield (
            str(batch),
            f"{plain['tokens_per_s']:.0f}",
            f"{part['ratios'][batch]:.2f}",
            f"{ratio:.2f}",
            f"{policy['drafts_per_row']:.1f}",
        )


def summary(report: PartReport) -> list[str]:
    """Return a line for each part, below it what failed, and what it found in short."""
    plain, lines = report.to_json(), []
    for name, part in plain["parts"].items():
        result = "passed" if part.get("passed", True) else "FAILED"
        lines.append(f"{result} {name} ({part['seconds']} s) {part.get('error', '')}".rstrip())
        lines += [f"    {line}" for line in _details(part)]
    lines += [f"skipped {name}: {reason}" for name, reason in plain["skipped"].items()]
    lines += [
        f"aim {name} ({part}): {' '.join(rest)}" for name, part, *rest in _aim_rows(plain["parts"])
    ]
    return lines


def _details(part: Result) -> Iterator[str]:
    """Yield the failed cases of a part, the end of its traceback, and its figures in a line."""
    for name, case in part.get("cases", {}).items():
        if not case.get("passed", True):
            yield f"{name}: {case.get('error') or _short(case)}"
    yield from (part.get("traceback") or part.get("log", ()))[-5:]
    yield from part.get("stack", ())[:6]
    figures = {key: value for key, value in part.items() if key not in _LONG and value is not None}
    if figures:
        yield _short(figures)


_LONG = {
    "rates",
    *("passed", "error", "traceback", "log", "stack", "seconds", "cases", "cells", "aims"),
    *("prompt_cells", "extras_cells", "tree_cells", "sums", "service_cells", "peer_cells"),
    *("profiles", "plans", "steps", "command", "output", "medusa", "dspark", "placements"),
    *("trees of 24", "trees of 60"),
}
_MAX_DETAIL_CHARS = 400


def _short(figures: Result) -> str:
    text = ", ".join(f"{key} {_rounded(value)}" for key, value in figures.items())
    return text[:_MAX_DETAIL_CHARS]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
