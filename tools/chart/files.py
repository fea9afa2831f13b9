"""Maps each generated file of k8s/ to the function that generates it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from cluster.config.config_file import PATHS_OF_THE_SERVICE
from cluster.config.serve_config import ServeConfig
from tools.chart.kinds import Values
from tools.chart.manifests import manifest_yaml
from tools.chart.models_values import Model, ModelImage
from tools.chart.pod_values import WorkerGroup
from tools.chart.readme import readme_md
from tools.chart.schema import schema_json
from tools.chart.security_values import Keys, NetworkPolicy, Security
from tools.chart.values import ChartValues
from tools.chart.values_file import values_yaml
from tools.generated_files import GENERATED_BY_CHART, GeneratedFiles
from tools.monitoring.dashboard import dashboard_json
from tools.monitoring.prometheus_files import rules_yaml

CHART = Path("k8s/specdec")
MANIFESTS = Path("k8s/manifests")

_PROJECT = Path("pyproject.toml")


def chart_yaml() -> str:
    """Generate Chart.yaml with the version of the project and of Ray."""
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
    return GENERATED_BY_CHART + yaml.safe_dump(content, sort_keys=False, width=100)


def serve_yaml() -> str:
    """Generate what templates need of the service: its gRPC functions and reserved paths."""
    from cluster.serve.application import grpc_options  # loads Ray

    functions = grpc_options(ServeConfig(ingress="serve")).grpc_servicer_functions
    content = {
        "grpc_servicer_functions": functions,
        "paths_of_the_service": sorted(PATHS_OF_THE_SERVICE),
    }
    return GENERATED_BY_CHART + yaml.safe_dump(content)


def defaults_json() -> str:
    """Generate the defaults of list and map entries, which values.yaml cannot provide."""
    entries: dict[str, type[Values]] = {
        "model": Model,
        "modelImage": ModelImage,
        "workerGroup": WorkerGroup,
    }
    content: dict[str, Any] = {name: _defaults(entry) for name, entry in entries.items()}
    content["groupsInValues"] = sorted(ChartValues().worker_groups)
    content["absent"] = _absent(ChartValues())
    return json.dumps(content, indent=2) + "\n"


def _defaults(model: type[Values]) -> dict[str, Any]:
    """Return the defaults by key, without the required values."""
    return {
        field.alias or name: _plain(field.get_default(call_default_factory=True))
        for name, field in model.model_fields.items()
        if not field.is_required()
    }


def _absent(values: Values) -> dict[str, Any]:
    """Return what each value stands for where it is null: off, empty, or its default.

    None for what protects the service, whose value must be written.
    """
    return {
        field.alias or name: _absent_value(values, name)
        for name, field in type(values).model_fields.items()
    }


def _absent_value(of: Values, name: str) -> Any:
    match getattr(of, name):
        case Values() as section:
            return _absent(section)
        case dict() | list() as content:
            return None if isinstance(of, Security) else type(content)()
        case bool() if name in ("enabled", "create"):
            return None if isinstance(of, Keys | NetworkPolicy) else False
        case value:
            return value


def _plain(value: Any) -> Any:
    return value.model_dump(by_alias=True) if isinstance(value, Values) else value


_CHART_FILES: Mapping[str, Callable[[], str]] = {  # path in the chart -> generator
    "Chart.yaml": chart_yaml,
    "values.yaml": values_yaml,
    "values.schema.json": schema_json,
    "README.md": readme_md,
    "files/serve.yaml": serve_yaml,
    "files/defaults.json": defaults_json,
    "files/rules.yaml": rules_yaml,
    "files/dashboard.json": dashboard_json,
}


def generated_files(root: Path) -> GeneratedFiles:
    """Return all generated files below `root`: the chart's, then the manifests rendered from it."""
    chart = root / CHART
    files = {chart / name: generate for name, generate in _CHART_FILES.items()}
    for example in sorted((chart / "examples").glob("*.yaml")):
        files[root / MANIFESTS / example.name] = partial(manifest_yaml, chart, example)
    return files
