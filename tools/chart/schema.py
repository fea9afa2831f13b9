"""values.schema.json: what Helm checks values against, before a template sees them."""

from __future__ import annotations

import json
from typing import Any

from tools.chart.values import ChartValues


def schema_json() -> str:
    """The schema of ChartValues, and of what Helm itself adds."""
    schema = _cleaned(ChartValues.model_json_schema())
    # For a chart that has this one as a dependency.
    schema["properties"]["global"] = {"type": "object", "description": "Of a parent chart"}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of specdec"}
    return json.dumps(head | schema, indent=2, ensure_ascii=False) + "\n"


def _cleaned(schema: Any, of_names: bool = False) -> Any:
    """Without the titles and defaults that pydantic adds: values.yaml has them.

    of_names: the keys are those of values, one of which may be called title.
    """
    if isinstance(schema, list):
        return [_cleaned(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _cleaned(each, key in ("properties", "$defs") and not of_names)
        for key, each in schema.items()
        if of_names or key not in ("title", "default")
    }
