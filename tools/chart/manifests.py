"""The examples rendered, for those without Helm: what `kubectl apply` takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tools.chart.prerequisites import commands
from tools.chart.security_values import Auth

_NAME = "specdec"
_SECRETS = {  # Helm makes them up; a file that is shared cannot
    "auth": {
        "apiKeys": {"existingSecret": "specdec-api-keys"},
        "adminToken": {"existingSecret": "specdec-admin-token"},
    },
}
_LEFT_OUT = {  # `helm test` is Helm's, and deploy/grafana has the dashboard
    "tests": {"enabled": False},
    "monitoring": {"dashboard": {"enabled": False}},
}
_OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by", "helm.sh/resource-policy")
_INTRODUCTION = """\
# Made by `make chart` from k8s/specdec/examples/{example}; a test compares the two.
# Yours to make first, of files of your own, or to see that it is there:
#   kubectl create namespace specdec
{commands}
"""


def manifest_yaml(chart: Path, example: Path) -> str:
    """All objects of an example, in a namespace of their own."""
    values = _merged(_SECRETS, yaml.safe_load(example.read_text(encoding="utf-8")))
    values = _merged(values, _LEFT_OUT)
    with helm_python.Chart.load(chart) as loaded:
        files = loaded.render(values, name=_NAME, namespace=_NAME)
    texts = [text for path, text in sorted(files.items()) if not path.endswith("NOTES.txt")]
    objects = [_namespace(), *(each for text in texts for each in _objects(text))]
    auth = Auth.model_validate(values["auth"])
    keys = {"api-keys": auth.api_keys.key, "admin-token": auth.admin_token.key}
    needed = [f"#   {each}" for each in commands(objects, _NAME, keys)]
    introduction = _INTRODUCTION.format(example=example.name, commands="\n".join(needed))
    return introduction + "".join(f"---\n{_dumped(each)}" for each in objects)


def _namespace() -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": _NAME, "labels": labels}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for each in yaml.safe_load_all(text):
        if each:
            yield _without_helm(each)


def _without_helm(content: Any) -> Any:
    if isinstance(content, list):
        return [_without_helm(each) for each in content]
    if not isinstance(content, dict):
        return content
    kept = {key: _without_helm(each) for key, each in content.items() if key not in _OF_HELM}
    return {key: each for key, each in kept.items() if (key, each) != ("annotations", {})}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Key by key; `above` wins."""
    result = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            result[key] = _merged(below[key], above[key])
    return result


class _Dumper(yaml.SafeDumper):
    """Keeps the lines of a text of several, and writes what is there twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def _dumped(content: dict[str, Any]) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100)
