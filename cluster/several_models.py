"""A configuration file that lists several models, each for an application of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster.config import ServeConfig
from cluster.config_file import read_config_file
from specdec.errors import InvalidValueError

_OF_THE_SERVICE = (
    "ingress",
    "host",
    "grpc_port",
    "http_port",
    "grpc_max_message_mib",
    "tls_cert_file",
    "tls_key_file",
    "ray_address",
    "log_level",
    "log_format",
)
_OF_A_MODEL = ("model", "served_model_name")
_MAX_NAME_CHARS = 63  # of a DNS label


def read_models(
    path: Path, overrides: Mapping[str, Any] = MappingProxyType({})
) -> tuple[ServeConfig, ...]:
    """One configuration for each of `models`, or the only one of a file without that.

    What stands beside `models` holds for all of them; `overrides` win over it, and what a model
    says of itself over both. Raises InvalidValueError.
    """
    content = read_config_file(path)
    if "models" not in content:
        return (ServeConfig.from_yaml(path, overrides),)
    models = content.pop("models")
    shared = {**content, **overrides}
    _refuse(_OF_A_MODEL, shared, "left out beside models, where each says its own")
    if not isinstance(models, list) or not models or not all(map(_is_mapping, models)):
        raise InvalidValueError("models", models, "a list of mappings of settings, at least one")
    for each in models:
        _refuse(_OF_THE_SERVICE, each, "left out of models: it holds for the whole service")
    configs = tuple(ServeConfig.from_mapping({**shared, **each}) for each in models)
    _check_together(configs)
    return configs


def application_name(config: ServeConfig) -> str:
    """What Serve calls the application of a model: its name as a DNS label."""
    label = re.sub(r"[^a-z0-9]+", "-", config.served_model_name.lower())
    return label[:_MAX_NAME_CHARS].strip("-") or "model"


def _check_together(configs: tuple[ServeConfig, ...]) -> None:
    first, *others = configs
    if others and first.ingress != "serve":
        limit = "serve for several models: they share its ports"
        raise InvalidValueError("ingress", first.ingress, limit)
    names: dict[str, str] = {}
    for config in configs:
        name = application_name(config)
        if name in names:
            limit = f"another one than {names[name]!r} of another model, beyond case and signs"
            raise InvalidValueError("served_model_name", config.served_model_name, limit)
        names[name] = config.served_model_name


def _refuse(keys: tuple[str, ...], mapping: Mapping[str, Any], limit: str) -> None:
    for key in keys:
        if key in mapping:
            raise InvalidValueError(key, mapping[key], limit)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict) and "models" not in value
