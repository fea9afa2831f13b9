"""Map each generated file to the function that generates it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.generated_files import GeneratedFiles
from tools.monitoring.dashboard import dashboard_json
from tools.monitoring.prometheus_files import rules_yaml, scrape_yaml

DASHBOARD = Path("grafana/specdec.json")
RULES = Path("prometheus/rules.yaml")
SCRAPE = Path("prometheus/prometheus.yaml")

GENERATORS: Mapping[Path, Callable[[], str]] = {
    DASHBOARD: dashboard_json,
    RULES: rules_yaml,
    SCRAPE: scrape_yaml,
}


def generated_files(folder: Path) -> GeneratedFiles:
    """Return the generated files with their paths below `folder`."""
    return {folder / path: generate for path, generate in GENERATORS.items()}
