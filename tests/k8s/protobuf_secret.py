"""Decodes a Secret from protobuf, the format in which Helm's Kubernetes client sends releases.

Of k8s.io/api/core/v1/generated.proto as much as such a Secret has: a length before each field.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"

_RAW = 2  # of runtime.Unknown
_METADATA, _DATA, _TYPE = 1, 2, 3  # of Secret
_NAME, _NAMESPACE, _LABELS = 1, 3, 11  # of ObjectMeta
_KEY, _VALUE = 1, 2  # of an entry of a map

_VARINT, _BYTES = 0, 2


def read_secret(body: bytes) -> dict[str, Any]:
    """Return the Secret in its JSON form."""
    raw = dict(_fields(body.removeprefix(MAGIC)))[_RAW]
    secret: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret", "data": {}}
    for number, content in _fields(raw):
        if number == _METADATA:
            secret["metadata"] = _read_metadata(content)
        elif number == _DATA:
            entry = dict(_fields(content))
            secret["data"][entry[_KEY].decode()] = base64.b64encode(entry[_VALUE]).decode()
        elif number == _TYPE:
            secret["type"] = content.decode()
    return secret


def _read_metadata(content: bytes) -> dict[str, Any]:
    metadata: dict[str, Any] = {"labels": {}}
    for number, value in _fields(content):
        if number in (_NAME, _NAMESPACE):
            metadata["name" if number == _NAME else "namespace"] = value.decode()
        elif number == _LABELS:
            entry = dict(_fields(value))
            metadata["labels"][entry[_KEY].decode()] = entry[_VALUE].decode()
    return metadata


def _fields(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each length-delimited field; other wire types are skipped."""
    position = 0
    while position < len(content):
        tag, position = _varint(content, position)
        size, position = _varint(content, position)
        if tag & 7 == _VARINT:
            continue
        assert tag & 7 == _BYTES
        yield tag >> 3, content[position : position + size]
        position += size


def _varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
