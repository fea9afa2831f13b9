"""Renders the chart with the library on which Helm 4 is built."""

from __future__ import annotations

import functools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "k8s" / "specdec"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))

Objects = list[dict[str, Any]]


@functools.cache
def chart():
    # Go reads this once: a garbage collection per doubled heap takes a quarter of the time.
    os.environ.setdefault("GOGC", "800")
    helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    return helm_python.Chart.load(CHART)


def render(values=None, *, name="demo", namespace="llm", notes=False) -> Any:
    """Return the objects that `helm template` prints; with notes, NOTES.txt instead.

    Raises Helm's error for values that the schema or a template rejects.
    """
    objects, text = _rendered(json.dumps(values or {}), name, namespace)
    return text if notes else pickle.loads(objects)


@functools.cache
def _rendered(values: str, name: str, namespace: str) -> tuple[bytes, str]:
    """Return the pickled objects, and NOTES.txt; many tests render the same values (JSON)."""
    chart().validate_schema(json.loads(values))
    files = chart().render(json.loads(values), name=name, namespace=namespace)
    texts = [text for path, text in sorted(files.items()) if not path.endswith("NOTES.txt")]
    objects = [each for text in texts for each in parsed(text)]
    return pickle.dumps(objects), files["specdec/templates/NOTES.txt"]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Rejects a key that occurs twice in a mapping, as kubectl does.

    It parses with libyaml if that is available, which is ten times as fast.
    """

    def construct_mapping(self, node, deep=False):
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "duplicate key", node.start_mark)
        return mapping


def parsed(text: str) -> Objects:
    """Parse the objects of a YAML stream."""
    return [each for each in yaml.load_all(text, _Loader) if each]


def example(name: str) -> dict[str, Any]:
    return yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())


def only(objects: Objects, kind: str, suffix: str = "") -> dict[str, Any]:
    """Return the only object of a kind with this suffix in its name."""
    [found] = of_kind(objects, kind, suffix)
    return found


def of_kind(objects: Objects, kind: str, suffix: str = "") -> Objects:
    return [
        each
        for each in objects
        if each["kind"] == kind and each["metadata"]["name"].endswith(suffix)
    ]


def cluster(objects: Objects) -> dict[str, Any]:
    return only(objects, "RayService")["spec"]["rayClusterConfig"]


def ray_templates(objects: Objects) -> dict[str, dict[str, Any]]:
    """Return the pod templates by the name of their group."""
    spec = cluster(objects)
    workers = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"], **workers}


def pod_specs(objects: Objects) -> dict[str, dict[str, Any]]:
    """Return the spec of every pod of the release."""
    specs = {name: template["spec"] for name, template in ray_templates(objects).items()}
    for each in of_kind(objects, "Pod"):
        specs[each["metadata"]["name"]] = each["spec"]
    for each in of_kind(objects, "Deployment"):
        specs[each["metadata"]["name"]] = each["spec"]["template"]["spec"]
    return specs


def serve_config(objects: Objects) -> dict[str, Any]:
    return yaml.safe_load(only(objects, "RayService")["spec"]["serveConfigV2"])
