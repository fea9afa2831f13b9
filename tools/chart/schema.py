"""Generates values.schema.json, by which Helm validates values before it renders templates."""

from __future__ import annotations

import json
from typing import Any

from tools.chart.values import ChartValues


def schema_json() -> str:
    """Generate the JSON schema of ChartValues, with the key `global` that Helm adds."""
    schema = _cleaned(ChartValues.model_json_schema())
    # Set by Helm if this chart is a dependency of another one.
    schema["properties"]["global"] = {"type": "object", "description": "Values of a parent chart"}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of specdec"}
    return json.dumps(head | schema, indent=2, ensure_ascii=False) + "\n"


def _cleaned(schema: Any, is_properties: bool = False) -> Any:
    """Return the schema without the titles and defaults that pydantic adds.

    is_properties: the keys of `schema` are names of values, one of which may be `title`.
    """
    if isinstance(schema, list):
        return [_cleaned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _cleaned(value, key in ("properties", "$defs") and not is_properties)
        for key, value in schema.items()
        if is_properties or key not in ("title", "default")
    }
