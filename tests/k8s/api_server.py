"""A fake Kubernetes API server that stores objects, and rejects those that a real one rejects.

It implements the part of the API that `helm install`, `upgrade`, `rollback` and `uninstall` use.
It has no controllers: no pods are created or scheduled.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import yaml

from tests.k8s.protobuf_secret import MAGIC, read_secret
from tests.k8s.validity import check

KINDS = {
    "v1": {
        "secrets": "Secret",
        "configmaps": "ConfigMap",
        "serviceaccounts": "ServiceAccount",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "services": "Service",
        "pods": "Pod",
    },
    "apps/v1": {"deployments": "Deployment"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "ray.io/v1": {"rayservices": "RayService"},
}
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+/[^/]+))/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?"
)
_VERBS = ["create", "delete", "get", "list", "patch", "update"]

Key = tuple[str, str, str]
"""API version, resource, name."""


class RejectedError(Exception):
    """Error response. code: the HTTP status; reason: Kubernetes' name of the error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class ApiServer:
    """The stored objects of one namespace."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self._versions = itertools.count(1)
        self.lock = threading.Lock()

    def names(self, kind: str) -> list[str]:
        """Return the names of all objects of a kind, without Helm's release records."""
        return sorted(
            name
            for (_, _, name), each in self.objects.items()
            if each["kind"] == kind and not name.startswith("sh.helm.")
        )

    def one(self, kind: str, name: str) -> dict[str, Any]:
        [found] = [
            each
            for (_, _, its_name), each in self.objects.items()
            if each["kind"] == kind and its_name == name
        ]
        return found

    def discover(self, path: str) -> dict[str, Any] | None:
        """Return the discovery document of a path, or None if the path names objects."""
        if path == "/version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(_groups())}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        return _resources(version) if version in KINDS else None

    def put(self, key: Key, content: dict[str, Any]) -> dict[str, Any]:
        """Store an object. Raises RejectedError for one that a real API server would reject."""
        shown = {name: each for name, each in content.items() if name != "status"}
        try:
            check(shown)
        except jsonschema.ValidationError as error:
            raise RejectedError(422, "Invalid", f"{key}: {error.message}") from error
        kept = copy.deepcopy(content)
        kept["metadata"] |= {
            "namespace": "llm",
            "uid": f"{key[1]}-{key[2]}",
            "resourceVersion": str(next(self._versions)),
        }
        self.objects[key] = kept
        return kept

    def find(self, key: Key) -> dict[str, Any]:
        if key not in self.objects:
            raise RejectedError(404, "NotFound", f"{key[1]} {key[2]!r} not found")
        return self.objects[key]


def _read(body: bytes) -> dict[str, Any]:
    if body.startswith(MAGIC):
        return read_secret(body)
    return yaml.safe_load(body) if body else {}


def _groups() -> Iterator[dict[str, Any]]:
    for each in KINDS:
        if "/" in each:
            version = {"groupVersion": each, "version": each.partition("/")[2]}
            group = each.partition("/")[0]
            yield {"name": group, "versions": [version], "preferredVersion": version}


def _resources(version: str) -> dict[str, Any]:
    resources = [
        {
            "name": name,
            "singularName": kind.lower(),
            "namespaced": True,
            "kind": kind,
            "verbs": _VERBS,
        }
        for name, kind in KINDS[version].items()
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": resources,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ApiServer

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            with self.api.lock:
                code, content = self._handle(body)
        except RejectedError as refusal:
            code = refusal.code
            content = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": refusal.reason,
                "message": str(refusal),
                "code": code,
            }
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - http.server's names

    def _handle(self, body: bytes) -> tuple[int, dict[str, Any]]:
        url = urlsplit(self.path)
        if (about := self.api.discover(url.path.rstrip("/"))) is not None:
            return 200, about
        match = _PATH.fullmatch(url.path)
        if match is None or match["resource"] not in KINDS.get(match["group"] or "v1", {}):
            raise RejectedError(404, "NotFound", f"no such path: {url.path}")
        version, resource, name = match["group"] or "v1", match["resource"], match["name"]
        content = _read(body)
        if self.command == "POST":
            return 201, self._create(version, resource, content)
        if name is None:
            return 200, self._list(version, resource, parse_qs(url.query))
        key = (version, resource, name)
        if self.command == "GET":
            return 200, self.api.find(key)
        if self.command == "DELETE":
            self.api.find(key)
            del self.api.objects[key]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        if self.command == "PUT":
            return 200, self.api.put(key, content)
        return 200, self._patch(key, content)

    def _create(self, version: str, resource: str, content: dict[str, Any]) -> dict[str, Any]:
        key = (version, resource, content["metadata"]["name"])
        if key in self.api.objects:
            raise RejectedError(409, "AlreadyExists", f"{resource} {key[2]!r} already exists")
        return self.api.put(key, content)

    def _list(self, version: str, resource: str, query: dict[str, list[str]]) -> dict[str, Any]:
        selectors = [each.partition("=") for each in query.get("labelSelector", [""])[0].split(",")]
        wanted = {name: value for name, _, value in selectors if name}
        items = [
            each
            for (its_version, its_resource, _), each in self.api.objects.items()
            if (its_version, its_resource) == (version, resource)
            and wanted.items() <= each["metadata"].get("labels", {}).items()
        ]
        kind = f"{KINDS[version][resource]}List"
        return {"kind": kind, "apiVersion": version, "metadata": {}, "items": items}

    def _patch(self, key: Key, content: dict[str, Any]) -> dict[str, Any]:
        if "apply-patch" in self.headers["Content-Type"]:  # server-side apply, used by Helm only
            return self.api.put(key, content)
        return self.api.put(key, _patched(self.api.find(key), content))


def _patched(below: Any, patch: Any) -> Any:
    """Apply a JSON merge patch; in the objects here it equals Helm's strategic merge patches."""
    if not isinstance(patch, dict):
        return patch
    result = dict(below) if isinstance(below, dict) else {}
    for name, each in patch.items():
        if name.startswith("$"):
            continue
        if each is None:
            result.pop(name, None)
        else:
            result[name] = _patched(result.get(name), each)
    return result


@contextmanager
def running_api_server(folder: Path) -> Iterator[tuple[ApiServer, Path]]:
    """Run the server on a free loopback port; yield it with a kubeconfig."""
    api = ApiServer()
    handler = type("Handler", (_Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "it", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
        "current-context": "it",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    try:
        yield api, path
    finally:
        server.shutdown()
        server.server_close()
