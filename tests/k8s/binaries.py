"""Helm and the other programs that `make test-chart` fetches; tests skip if one is missing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.k8s.rendering import CHART, ROOT

TOOLS = Path(os.environ.get("SPECDEC_CHART_TOOLS", ROOT / ".make" / "chart-tools"))
HELMS = ("helm3", "helm4")


def tool(path: str) -> str:
    """Return the path of a program below the tools' folder; skip the test if it is missing."""
    if not (TOOLS / path).exists():
        pytest.skip(f"{TOOLS / path} is missing; `make test-chart` fetches it")
    return str(TOOLS / path)


def helm(which: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run Helm 3 or 4."""
    command = [tool(f"{which}/helm"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def template(which: str, values: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    flags = ["--namespace", "llm", "--values", values, *arguments]
    return helm(which, "template", "demo", CHART, *flags)
