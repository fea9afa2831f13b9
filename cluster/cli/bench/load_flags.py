"""Types of flags that list values, and dataclass fields that have a flag."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import field, fields
from functools import partial
from typing import Any

from cluster.cli.bench.load import LATENCIES, LatencyName
from cluster.cli.output import Flag, combine_flags, section_flag


def concurrency(text: str) -> int:
    """Parse a concurrency limit. Raises ValueError."""
    if not (text.isdecimal() and 1 <= int(text) <= 1024):
        raise ValueError("each must be a whole number from 1 to 1024")
    return int(text)


def rate(text: str) -> float:
    """Parse a number above 0, or inf. Raises ValueError."""
    with suppress(ValueError):
        if (rate := float(text)) > 0:
            return rate
    raise ValueError("each must be a number above 0, or inf")


def percent(text: str) -> float:
    """Parse a percentage. Raises ValueError."""
    with suppress(ValueError):
        if 0 <= (percent := float(text)) <= 100:
            return percent
    raise ValueError("each must be a number from 0 to 100")


def latency(text: str) -> LatencyName:
    """Parse the name of a latency. Raises ValueError."""
    for name in LATENCIES:
        if name == text:
            return name
    raise ValueError(f"each must be one of {', '.join(LATENCIES)}")


def objective(text: str) -> tuple[LatencyName, float]:
    """Parse a latency objective, as NAME:MS. Raises ValueError."""
    name, _, given = text.partition(":")
    with suppress(ValueError):
        if (limit_ms := float(given)) > 0:
            return latency(name), limit_ms
    names = ", ".join(LATENCIES)
    raise ValueError(f"each must be METRIC:MILLISECONDS, such as ttft:200; the metrics are {names}")


def flag_field(
    section: str, text: str, kind: Any = None, *, flag: str | None = None, **attributes: Any
) -> Any:
    """Return a dataclass field with a flag in a section of the help.

    text: the help. kind: type of the flag. flag: its name, if that is not the field's. attributes:
    of `click.option`.
    """
    attributes.setdefault("show_default", attributes.get("default") is not None)

    def add(name: str) -> Flag:
        given = flag or f"--{name.replace('_', '-')}"
        return section_flag(section, given, name, type=kind, help=text, **attributes)

    return field(metadata={"flag": add})


service_flag = partial(flag_field, "Service")
load_flag = partial(flag_field, "Load")
dataset_flag = partial(flag_field, "Dataset")
sampling_flag = partial(flag_field, "Sampling and speculation")
report_flag = partial(flag_field, "Report")


def field_flags(options: type[Any]) -> Flag:
    """Return the flags of those fields of a dataclass that were made by `flag_field`."""
    found = [each for each in fields(options) if "flag" in each.metadata]
    return combine_flags(*(each.metadata["flag"](each.name) for each in found))
