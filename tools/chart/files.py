"""Which file of k8s/ holds what."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from cluster.config.serve_config import ServeConfig
from tools.chart.kinds import Values
from tools.chart.manifests import manifest_yaml
from tools.chart.models_values import Model, ModelImage
from tools.chart.pod_values import WorkerGroup
from tools.chart.readme import readme_md
from tools.chart.schema import schema_json
from tools.chart.values_file import values_yaml
from tools.made_files import MadeFiles
from tools.monitoring.dashboard import dashboard_json
from tools.monitoring.prometheus_files import rules_yaml

CHART = Path("k8s/specdec")
MANIFESTS = Path("k8s/manifests")

_PROJECT = Path("pyproject.toml")
_MADE = "# Made by `make chart` from tools/chart; a test compares the two.\n"


def chart_yaml() -> str:
    """Chart.yaml, with the versions that the project has."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    content = {
        "apiVersion": "v2",
        "name": project["name"],
        "description": project["description"],
        "type": "application",
        "version": project["version"],
        "appVersion": project["version"],
        "kubeVersion": ">=1.29.0-0",
        "keywords": ["llm", "speculative-decoding", "ray", "inference"],
        "annotations": {"specdec/ray-version": version("ray")},
    }
    return _MADE + yaml.safe_dump(content, sort_keys=False, width=100)


def serve_yaml() -> str:
    """What Serve's own gRPC ingress carries, as the service itself says it."""
    from cluster.serve.deployment import grpc_options  # loads Ray

    functions = grpc_options(ServeConfig(ingress="serve")).grpc_servicer_functions
    return _MADE + yaml.safe_dump({"grpc_servicer_functions": functions})


def defaults_json() -> str:
    """Defaults of what there may be several of, which values.yaml cannot give."""
    several: dict[str, type[Values]] = {
        "model": Model,
        "modelImage": ModelImage,
        "workerGroup": WorkerGroup,
    }
    content = {name: _defaults(each) for name, each in several.items()}
    return json.dumps(content, indent=2) + "\n"


def _defaults(of: type[Values]) -> dict[str, Any]:
    """By key, of those values that have one."""
    return {
        field.alias or name: _plain(field.get_default(call_default_factory=True))
        for name, field in of.model_fields.items()
        if not field.is_required()
    }


def _plain(value: Any) -> Any:
    return value.model_dump(by_alias=True) if isinstance(value, Values) else value


_CHART_FILES: Mapping[str, Callable[[], str]] = {
    "Chart.yaml": chart_yaml,
    "values.yaml": values_yaml,
    "values.schema.json": schema_json,
    "README.md": readme_md,
    "files/serve.yaml": serve_yaml,
    "files/defaults.json": defaults_json,
    "files/rules.yaml": rules_yaml,
    "files/dashboard.json": dashboard_json,
}


def made(root: Path) -> MadeFiles:
    """All files below `root` by path: the chart's, then what is rendered of them."""
    chart = root / CHART
    files = {chart / name: make for name, make in _CHART_FILES.items()}
    for example in sorted((chart / "examples").glob("*.yaml")):
        files[root / MANIFESTS / example.name] = partial(manifest_yaml, chart, example)
    return files
