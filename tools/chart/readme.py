"""README.md of the chart: how to install it, and every value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tools.chart.values import ChartValues

_INTRODUCTION = """\
<!-- Made by `make chart` from tools/chart; a test compares the two. -->

# specdec

A Helm chart (3.17 or later, and 4) for specdec on Kubernetes 1.29 or later, with KubeRay 1.6 or
later: one RayService that serves one or more models. [docs/kubernetes.md](../../docs/kubernetes.md)
is the guide; [examples/](examples) has values for six kinds of cluster, and
[../manifests](../manifests) the same rendered, for those without Helm.

```bash
helm install chat k8s/specdec --namespace llm --create-namespace \\
  --values k8s/specdec/examples/laptop.yaml
helm test chat --namespace llm
```

## Values

A value below `models[]`, `modelImages[]` or `workerGroups.NAME` is of each of them. Where the type
is an object without values of its own it is passed on to Kubernetes, or is what it says.

| value | type | default | meaning |
|---|---|---|---|
"""


def readme_md() -> str:
    """The whole file."""
    return _INTRODUCTION + "\n".join(_rows(ChartValues, "")) + "\n"


def _rows(of: type[BaseModel], above: str) -> Iterator[str]:
    for name, field in of.model_fields.items():
        path = above + (field.alias or name)
        inner, suffix = _inner(field.annotation)
        if inner is None:
            yield _row(path, field)
        else:
            yield from _rows(inner, f"{path}{suffix}.")


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The model that a field has in it, and how it is written that there are several."""
    arguments = get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    if get_origin(annotation) is list and _is_model(arguments[0]):
        return arguments[0], "[]"
    if get_origin(annotation) is dict and _is_model(arguments[1]):
        return arguments[1], ".NAME"
    return None, ""


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _row(path: str, field: FieldInfo) -> str:
    default = "needed" if field.is_required() else f"`{json.dumps(_default(field))}`"
    meaning = (field.description or "").replace("|", "\\|")
    return f"| `{path}` | {_type(field.annotation)} | {default} | {meaning} |"


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if arguments and all(isinstance(each, str) for each in arguments):
        return "one of " + ", ".join(f"`{each}`" if each else "empty" for each in arguments)
    if origin is list:
        return "list"
    if origin is dict or annotation is dict:
        return "object"
    if arguments:
        return " or ".join(dict.fromkeys(_type(each) for each in arguments))
    return {int: "integer", float: "number", bool: "boolean", str: "text"}.get(annotation, "object")
