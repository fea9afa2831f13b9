"""The base class of the chart's values, and the field types that several of them share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Values(BaseModel):
    """Base class of a mapping of values: camelCase keys in YAML, unknown keys are rejected."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )


KubernetesObject = dict[str, Any]
"""Passed to Kubernetes unchanged, and validated by its schema."""

Labels = dict[str, str]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
OptionalName = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]
"""Name of a Kubernetes object, or empty."""

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?$")]
AbsolutePath = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")]
Duration = Annotated[str, Field(pattern=r"^([0-9]+(ms|s|m|h))+$")]
HostName = Annotated[
    str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?)$")
]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0, le=1024)]


class SecretKey(Values):
    """Reference to a key of an existing Secret."""

    name: OptionalName = Field("", description="Name of the Secret; empty for none")
    key: str = Field("token", description="Key in the Secret", min_length=1)


_AMOUNT_OR_NULL = {"type": ["string", "number", "null"]}
ResourceAmounts = Annotated[
    dict[str, str | int | float],
    Field(json_schema_extra={"properties": dict.fromkeys(("cpu", "memory"), _AMOUNT_OR_NULL)}),
]
"""Amounts by resource name; null removes the amount of a resource that has a default."""


class Resources(Values):
    """Resource requests and limits of a container."""

    requests: ResourceAmounts = Field(
        default_factory=dict, description="Requests, by resource name"
    )
    limits: ResourceAmounts = Field(
        default_factory=dict, description="Limits, by resource name; null removes a default one"
    )
