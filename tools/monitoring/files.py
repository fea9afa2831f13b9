"""Which file holds what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.monitoring.dashboard import dashboard_json
from tools.monitoring.prometheus_files import rules_yaml, scrape_yaml

DASHBOARD = Path("grafana/specdec.json")
RULES = Path("prometheus/rules.yaml")
SCRAPE = Path("prometheus/prometheus.yaml")

MADE: Mapping[Path, Callable[[], str]] = {
    DASHBOARD: dashboard_json,
    RULES: rules_yaml,
    SCRAPE: scrape_yaml,
}


def write_files(folder: Path) -> None:
    """Makes all of them below `folder`."""
    for path, make in MADE.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(make(), encoding="utf-8")


def changed_files(folder: Path) -> list[Path]:
    """Those that are missing, or not as they would be made."""
    return [path for path, make in MADE.items() if _read(folder / path) != make()]


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None
