"""What the chart's values are made of: a frozen model, and the types that many share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Values(BaseModel):
    """A mapping of values. Spelled in camelCase in YAML; a key that is not a field is refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )


KubernetesObject = dict[str, Any]
"""Passed on as it is: Kubernetes' own schema says what belongs there."""

Labels = dict[str, str]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
OptionalName = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]
"""Of a Kubernetes object; empty where there is none."""

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?$")]
AbsolutePath = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")]
Duration = Annotated[str, Field(pattern=r"^([0-9]+(ms|s|m|h))+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0, le=1024)]


class SecretKey(Values):
    """A key of a Secret that exists already."""

    name: OptionalName = Field("", description="Secret that has it; empty for none")
    key: str = Field("token", description="Its key in the Secret", min_length=1)


class Resources(Values):
    """What a container asks for and may use."""

    requests: dict[str, str | int | float] = Field(
        default_factory=dict, description="What is reserved, by resource"
    )
    limits: dict[str, str | int | float] = Field(
        default_factory=dict, description="What may be used, by resource; Ray goes by these"
    )
