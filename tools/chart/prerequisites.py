"""Lists the objects that rendered manifests refer to and do not create.

These are secrets, priority classes and issuers; each is listed as the kubectl command that creates
it or checks that it exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_PLACEHOLDERS_PRIORITY = -10
"""Below 0, which is the priority of pods without a class."""


def commands(objects: list[dict[str, Any]], namespace: str, keys: dict[str, str]) -> list[str]:
    """Return the kubectl commands, sorted and without duplicates.

    keys: by volume name, the key of the Secret of a volume that lists no keys.
    """
    created = {item["spec"]["secretName"] for item in objects if item["kind"] == "Certificate"}
    secrets = {
        name: f"kubectl -n {namespace} create secret {arguments}"
        for mapping in _mappings(objects)
        for name, arguments in _secrets(mapping, keys)
        if name not in created
    }
    return sorted(secrets.values()) + sorted(set(_classes(objects)) | set(_issuers(objects)))


def _secrets(mapping: dict[str, Any], keys: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and kubectl arguments of each secret that a mapping itself refers to."""
    if isinstance(volume := mapping.get("secret"), dict):
        yield volume["secretName"], _volume_secret(mapping["name"], volume, keys)
    for reference in mapping.get("imagePullSecrets", []):
        name = reference["name"]
        yield name, f"docker-registry {name} --from-file=.dockerconfigjson"
    if isinstance(reference := mapping.get("secretKeyRef"), dict):
        yield reference["name"], f"generic {reference['name']} --from-file={reference['key']}"
    for reference in mapping.get("certificateRefs", []):
        yield reference["name"], _tls_secret(reference["name"])
    if isinstance(tls := mapping.get("tls"), list):  # of an Ingress
        for reference in tls:
            yield reference["secretName"], _tls_secret(reference["secretName"])


def _volume_secret(volume_name: str, volume: dict[str, Any], keys: dict[str, str]) -> str:
    name = volume["secretName"]
    files = [item["key"] for item in volume.get("items", [])] or [keys.get(volume_name, "")]
    if not any(files):
        return _tls_secret(name)
    return f"generic {name} " + " ".join(f"--from-file={file}" for file in files)


def _tls_secret(name: str) -> str:
    return f"tls {name} --cert=tls.crt --key=tls.key"


def _classes(objects: list[dict[str, Any]]) -> Iterator[str]:
    for item in objects:
        for mapping in _mappings(item):
            if name := mapping.get("priorityClassName"):
                if item["kind"] == "Deployment":  # KEDA's placeholders
                    value = f" --value={_PLACEHOLDERS_PRIORITY}"
                    yield f"kubectl create priorityclass {name}{value}"
                else:
                    yield f"kubectl get priorityclass {name}"


def _issuers(objects: list[dict[str, Any]]) -> Iterator[str]:
    for item in objects:
        if item["kind"] == "Certificate":
            issuer, namespace = item["spec"]["issuerRef"], item["metadata"]["namespace"]
            scope = "" if issuer["kind"] == "ClusterIssuer" else f"-n {namespace} "
            yield f"kubectl {scope}get {issuer['kind'].lower()} {issuer['name']}"


def _mappings(content: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings in `content`, at any depth."""
    if isinstance(content, list):
        for item in content:
            yield from _mappings(item)
    if isinstance(content, dict):
        yield content
        yield from _mappings(list(content.values()))
