"""AdminService's types as JSON, for HTTP and the command line."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from types import MappingProxyType
from typing import Any

from cluster.api.http.bodies import read_json
from specdec.config.fields import refuse_unknown_fields
from specdec.types.adapters import AdapterOrder, check_adapter_name, check_adapter_path
from specdec.types.control import CONTROL_VALUES, RateRule, SpeculationChange, SpeculationControl
from specdec.types.drafters import DrafterOrder
from specdec.types.errors import InvalidValueError
from specdec.types.reports.profile import ProfileOrder

_TYPE_LIMITS: Mapping[type, str] = {str: "a string", bool: "true or false", int: "a whole number"}
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("mode", "method", "updated_by", "reason"), str),
    **dict.fromkeys(("threshold", "num_speculative_tokens", "expected_version"), int),
    **dict.fromkeys(("allow_request_override", "reset"), bool),
}
_NEVER_NULL = ("reset", "updated_by", "reason")


def to_json(value: Any, omitted: Mapping[type, Collection[str]] = MappingProxyType({})) -> str:
    """Serialize a dataclass as one JSON object; datetimes become ISO 8601 strings.

    omitted: fields of classes to leave out.
    """

    def plain(part: Any) -> Any:
        if isinstance(part, datetime):
            return part.isoformat()
        is_control = isinstance(part, SpeculationControl)  # its other fields follow from the rules
        names = CONTROL_VALUES if is_control else [each.name for each in fields(part)]
        left_out = omitted.get(type(part), ())
        return {name: getattr(part, name) for name in names if name not in left_out}

    return json.dumps(value, ensure_ascii=False, default=plain)


def replicas_json(reports: Sequence[Any]) -> str:
    """Serialize what all replicas reported as one JSON object."""
    return to_json({"replicas": reports})


def read_change(body: bytes) -> SpeculationChange:
    """Parse a change. Raise InvalidValueError."""
    mapping = _read_object(body, SpeculationChange)
    values = {name: _read_value(name, value) for name, value in mapping.items()}
    return SpeculationChange(**values)


def read_profile_order(body: bytes) -> ProfileOrder:
    """Parse an order for a profile; omitted fields have their defaults. Raise InvalidValueError."""
    return ProfileOrder(**_read_object(body, ProfileOrder))


def read_drafter_order(body: bytes) -> DrafterOrder:
    """Parse an order for the versions of a draft head. Raise InvalidValueError."""
    return DrafterOrder(**_read_object(body, DrafterOrder)).with_change()


def read_adapter_order(body: bytes) -> AdapterOrder:
    """Parse an order to load an adapter, or without paths to unload it.

    Raise InvalidValueError.
    """
    order = AdapterOrder(**_read_object(body, AdapterOrder))
    check_adapter_name("name", order.name)
    return order


def read_load(body: bytes) -> AdapterOrder:
    """Parse the body of vLLM's /v1/load_lora_adapter. Raise InvalidValueError.

    `draft_lora_path` is not vLLM's: an adapter for the draft model or head.
    """
    names = ("lora_name", "lora_path", "draft_lora_path")
    given = _read_names(body, (*names, "load_inplace"))
    name, path, draft_path = (_text(given, each) for each in names)
    check_adapter_name("lora_name", name)
    if path or not draft_path:
        check_adapter_path("lora_path", path)
    if draft_path:
        check_adapter_path("draft_lora_path", draft_path)
    replaces = given.get("load_inplace", False)
    if not isinstance(replaces, bool):
        raise InvalidValueError("load_inplace", replaces, "true or false")
    return AdapterOrder.load(name, path, replaces=replaces, draft_path=draft_path)


def read_unload(body: bytes) -> AdapterOrder:
    """Parse the body of vLLM's /v1/unload_lora_adapter. Raise InvalidValueError.

    Its `lora_int_id` is accepted and has no effect: the name identifies an adapter.
    """
    name = _text(_read_names(body, ("lora_name", "lora_int_id")), "lora_name")
    check_adapter_name("lora_name", name)
    return AdapterOrder.unload(name)


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise InvalidValueError(name, value, "a string")
    return value


def _read_object(
    body: bytes, kind: type[SpeculationChange | ProfileOrder | DrafterOrder | AdapterOrder]
) -> dict[str, Any]:
    """Parse a JSON object whose names are fields of `kind`."""
    return _read_names(body, [each.name for each in fields(kind)])


def _read_names(body: bytes, names: Iterable[str]) -> dict[str, Any]:
    """Parse a JSON object with some of `names`."""
    try:
        mapping = read_json(body)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError("body", f"{len(body)} bytes", "a JSON object") from error
    if not isinstance(mapping, dict):
        raise InvalidValueError("body", mapping, "a JSON object")
    refuse_unknown_fields(mapping, names)
    return mapping


def _read_value(name: str, value: Any) -> Any:
    if value is None and name not in _NEVER_NULL:
        return None
    if name == "rules":
        if not isinstance(value, list):
            raise InvalidValueError("rules", value, "a list of objects")
        return tuple(_read_rule(f"rules[{index}]", each) for index, each in enumerate(value))
    if name == "allowed_verifiers":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InvalidValueError(name, value, "a list of strings")
        return tuple(value)
    expected = _TYPES.get(name)
    if expected is not None and type(value) is not expected:  # isinstance(True, int) is true
        raise InvalidValueError(name, value, _TYPE_LIMITS[expected])
    return value


def _read_rule(name: str, value: object) -> RateRule:
    known = [each.name for each in fields(RateRule)]
    if not isinstance(value, dict) or "min_requests_per_s" not in value:
        limit = f"an object with {', '.join(known)}; the first is required"
        raise InvalidValueError(name, value, limit)
    refuse_unknown_fields(value, known, name)
    return RateRule(**value)
