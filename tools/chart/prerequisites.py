"""What rendered objects ask for and do not make: secrets, priority classes, issuers.

As commands of kubectl, with which a person makes them or sees that they are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_PLACEHOLDERS_PRIORITY = -10
"""Below 0, the priority of pods that have no class."""


def commands(objects: list[dict[str, Any]], namespace: str, keys: dict[str, str]) -> list[str]:
    """Sorted, each once. keys: of the Secret in a volume that names none, by the volume's name."""
    made = {each["spec"]["secretName"] for each in objects if each["kind"] == "Certificate"}
    secrets = {
        name: f"kubectl -n {namespace} create secret {how}"
        for mapping in _mappings(objects)
        for name, how in _secrets(mapping, keys)
        if name not in made
    }
    return sorted(secrets.values()) + sorted(set(_classes(objects)) | set(_issuers(objects)))


def _secrets(mapping: dict[str, Any], keys: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Names of the secrets that a mapping asks for by itself, and how each is made."""
    if isinstance(volume := mapping.get("secret"), dict):
        yield volume["secretName"], _of_volume(mapping["name"], volume, keys)
    for each in mapping.get("imagePullSecrets", []):
        yield each["name"], f"docker-registry {each['name']} --from-file=.dockerconfigjson"
    for each in mapping.get("certificateRefs", []):
        yield each["name"], _of_tls(each["name"])
    if isinstance(tls := mapping.get("tls"), list):  # of an Ingress
        for each in tls:
            yield each["secretName"], _of_tls(each["secretName"])


def _of_volume(volume_name: str, volume: dict[str, Any], keys: dict[str, str]) -> str:
    name = volume["secretName"]
    items = [each["key"] for each in volume.get("items", [])] or [keys.get(volume_name, "")]
    if not any(items):
        return _of_tls(name)
    return f"generic {name} " + " ".join(f"--from-file={each}" for each in items)


def _of_tls(name: str) -> str:
    return f"tls {name} --cert=tls.crt --key=tls.key"


def _classes(objects: list[dict[str, Any]]) -> Iterator[str]:
    for each in objects:
        for mapping in _mappings(each):
            if name := mapping.get("priorityClassName"):
                if each["kind"] == "Deployment":  # KEDA's placeholders
                    value = f" --value={_PLACEHOLDERS_PRIORITY}"
                    yield f"kubectl create priorityclass {name}{value}"
                else:
                    yield f"kubectl get priorityclass {name}"


def _issuers(objects: list[dict[str, Any]]) -> Iterator[str]:
    for each in objects:
        if each["kind"] == "Certificate":
            issuer, namespace = each["spec"]["issuerRef"], each["metadata"]["namespace"]
            scope = "" if issuer["kind"] == "ClusterIssuer" else f"-n {namespace} "
            yield f"kubectl {scope}get {issuer['kind'].lower()} {issuer['name']}"


def _mappings(content: Any) -> Iterator[dict[str, Any]]:
    """All there are in it, at any depth."""
    if isinstance(content, list):
        for each in content:
            yield from _mappings(each)
    if isinstance(content, dict):
        yield content
        yield from _mappings(list(content.values()))
