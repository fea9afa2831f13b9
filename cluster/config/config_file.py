"""Configuration files in YAML. Each model that a file lists becomes a Serve application."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from yaml.composer import ComposerError

from cluster.config.serve_config import ServeConfig
from cluster.config.vllm_compat import our_name
from specdec.types.errors import InvalidValueError

_OF_THE_SERVICE = (
    "ingress",
    "host",
    "allowed_hosts",
    "grpc_port",
    "http_port",
    "grpc_max_message_mib",
    "max_inflight_mib",
    "tls_cert_file",
    "tls_key_file",
    "ray_address",
    "log_level",
    "log_format",
)
_OF_A_MODEL = ("model", "served_model_name")
_MERGE = "tag:yaml.org,2002:merge"
_MAX_NAME_CHARS = 63  # of a DNS label

PATHS_OF_THE_SERVICE = frozenset(
    {
        *("v1", "v2", "generate", "tokenize", "detokenize", "score", "rerank"),
        *("dashboard", "metrics", "health", "ready", "load", "version", "openapi.json"),
        *("health_generate", "get_model_info", "model_info", "get_server_info", "server_info"),
        *("flush_cache", "reset_prefix_cache", "abort_request", "tokenizer_info"),
    }
)
"""First components of the paths of the model at "/"; no other model may have one as its prefix."""


class _UniqueKeys(yaml.SafeLoader):
    """Loader that refuses a key that a mapping has twice, as YAML demands; the last would count."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping as it is written, before others are merged into it."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        known = set[Any]()
        for key in (each for each, _ in node.value if isinstance(each, yaml.ScalarNode)):
            if key.tag == _MERGE:
                continue
            if (value := self.construct_object(key)) in known:
                problem = f"found the key {key.value!r} twice"
                raise ComposerError(None, None, problem, key.start_mark)
            known.add(value)
        return node


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises OSError, and ValueError if it is not valid."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # noqa: S506  # it is safe
    except (yaml.YAMLError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error  # by tags, such as !!bool, and by deep nesting


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the unvalidated mapping of a YAML file; {} if it is empty.

    Raises InvalidValueError if the file cannot be read or is not a mapping.
    """
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        limit = f"a readable YAML file ({reason})"
        raise InvalidValueError("configuration file", str(path), limit) from error
    if not isinstance(content, dict | None):
        raise InvalidValueError(
            "configuration file", str(path), "a YAML mapping of settings, such as model: ./my-llama"
        )
    return content or {}


def read_models(
    path: Path, overrides: Mapping[str, Any] = MappingProxyType({})
) -> tuple[ServeConfig, ...]:
    """Read one configuration for each entry of `models`, or a single one from a file without it.

    Settings beside `models` apply to all models; `overrides` take precedence over them, and the
    settings of a model's entry over both. Raises InvalidValueError.
    """
    content = read_config_file(path)
    if "models" not in content:
        return (ServeConfig.from_sources(content, overrides),)
    models = content.pop("models")
    for each in (content, overrides):
        _refuse(_OF_A_MODEL, each, "left out beside models; set it in each entry")
    if not isinstance(models, list) or not models or not all(map(_is_mapping, models)):
        raise InvalidValueError("models", models, "a list of mappings of settings, at least one")
    for each in models:
        _refuse(_OF_THE_SERVICE, each, "left out of models: it applies to the whole service")
    configs = tuple(ServeConfig.from_sources(content, overrides, each) for each in models)
    _check_together(configs)
    return configs


def application_name(config: ServeConfig) -> str:
    """Return the name of a model's Serve application: the model name as a DNS label."""
    label = re.sub(r"[^a-z0-9]+", "-", config.served_model_name.lower())
    return label[:_MAX_NAME_CHARS].strip("-") or "model"


def check_prefix(config: ServeConfig) -> None:
    """Raise InvalidValueError if the model's prefix would hide a path of the model at "/"."""
    if (name := application_name(config)) in PATHS_OF_THE_SERVICE:
        limit = f"a different name: /{name} is an API path of the model at /"
        raise InvalidValueError("served_model_name", config.served_model_name, limit)


def _check_together(configs: tuple[ServeConfig, ...]) -> None:
    first, *others = configs
    for each in others:
        check_prefix(each)
    if others and first.ingress != "serve":
        limit = "serve for several models: they share the ports"
        raise InvalidValueError("ingress", first.ingress, limit)
    names: dict[str, str] = {}
    for config in configs:
        name = application_name(config)
        if name in names:
            limit = f"different from {names[name]!r} in more than case and punctuation"
            raise InvalidValueError("served_model_name", config.served_model_name, limit)
        names[name] = config.served_model_name


def _refuse(names: tuple[str, ...], mapping: Mapping[str, Any], limit: str) -> None:
    for key, value in mapping.items():
        if our_name(key) in names:
            raise InvalidValueError(key, value, limit)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict) and "models" not in value
