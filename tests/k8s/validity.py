"""Validates objects as an API server does, by the schemas of Kubernetes and of its extensions.

As in an API server, a required field with a default may be absent, and unknown fields are rejected.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

SCHEMAS = Path(__file__).parent / "schemas"
OLDEST, NEWEST = "1.29", "1.34"
VERSIONS = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34")

_INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


def check(each: dict[str, Any], version: str = NEWEST) -> None:
    """Raise jsonschema.ValidationError if the object is invalid."""
    _check(json.dumps(each), version)


@functools.cache
def _check(content: str, version: str) -> None:
    """Check an object (JSON); most objects of two sets of values are the same."""
    each = json.loads(content)
    _check_keys_of_lists(each)
    if custom := _custom_schema(each["kind"], each["apiVersion"]):
        custom.validate(each)
        for template in _pod_templates(each):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
            _check_core({**pod, "spec": template["spec"]}, version)
    else:
        _check_core(each, version)


_LIST_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def _check_keys_of_lists(content: Any) -> None:
    """Raise jsonschema.ValidationError if two entries of a list have the key that must differ."""
    if isinstance(content, list):
        for entry in content:
            _check_keys_of_lists(entry)
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        _check_keys_of_lists(value)
        if name in _LIST_KEYS and isinstance(value, list):
            keys = [entry[_LIST_KEYS[name]] for entry in value]
            if len(set(keys)) < len(keys):
                raise jsonschema.ValidationError(f"{name}: a key occurs twice in {keys}")


def _check_core(each: dict[str, Any], version: str) -> None:
    group, _, revision = each["apiVersion"].rpartition("/")
    prefix = f"{group.split('.')[0]}-" if group else ""
    _core_schema(f"{each['kind'].lower()}-{prefix}{revision}.json", version).validate(each)


@functools.cache
def _core_schema(name: str, version: str) -> jsonschema.Draft202012Validator:
    """Load a schema of `kubernetes-validate --strict`, which rereads megabytes for each object."""
    schema = json.loads((_core_schemas(version) / name).read_text())
    registry = Resource.from_contents(schema) @ _core_definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _core_definitions(version: str) -> Registry:
    content = json.loads((_core_schemas(version) / "_definitions.json").read_text())
    return Resource.from_contents(content) @ Registry()


def _core_schemas(version: str) -> Path:
    package = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    folder = Path(package.__file__).parent / "kubernetes-json-schema"
    return folder / f"v{version}.0-local-strict"


def _pod_templates(each: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod templates of a RayService, whose schema does not validate pods completely."""
    if each["kind"] != "RayService":
        return []
    spec = each["spec"]["rayClusterConfig"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"] for group in groups]


@functools.cache
def _custom_schema(kind: str, api_version: str) -> jsonschema.Draft202012Validator | None:
    path = SCHEMAS / f"{kind.lower()}.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    assert api_version == f"{content['group']}/{content['version']}"
    schema = _as_json_schema(content["openAPIV3Schema"])
    schema["properties"].update({"metadata": {"type": "object"}})
    return jsonschema.Draft202012Validator(schema)


def _as_json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert the OpenAPI schema of a custom resource to a JSON schema without unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return _INT_OR_STRING
    result = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes")}
    if "properties" in schema:
        result["properties"] = {
            name: _as_json_schema(each) for name, each in schema["properties"].items()
        }
        is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
        result.setdefault("additionalProperties", is_open)
        absent = {name for name, each in schema["properties"].items() if "default" in each}
        result["required"] = [name for name in schema.get("required", []) if name not in absent]
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = _as_json_schema(schema[key])
    return result
