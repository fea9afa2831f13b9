"""Generates the JSON schema of a model's settings from what `specdec serve` accepts."""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin

from cluster.config.serve_config import ServeConfig
from specdec.config.fields import DIRECTORY, FILE, Limit, Setting
from specdec.config.speculation.method_roles import OTHER_ROLES
from specdec.config.speculation.methods import METHODS, keys_of
from specdec.config.speculation.speculative import key_types
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

CHART_SETTINGS = {
    "model": "models[].model",
    "served_model_name": "models[].name",
    "tensor_parallel_size": "models[].tensorParallelSize",
    "device": "models[].device",
    "speculative_config": "models[].speculativeConfig",
    "replicas_per_draft_worker": "models[].draft.replicasPerWorker",
    "min_draft_workers": "models[].draft.minWorkers",
    "max_draft_workers": "models[].draft.maxWorkers",
    "target_draft_utilization": "models[].draft.targetUtilization",
    "num_replicas": "models[].replicas",
    "min_replicas": "models[].autoscaling.minReplicas",
    "max_replicas": "models[].autoscaling.maxReplicas",
    "target_requests_per_replica": "models[].autoscaling.targetRequestsPerReplica",
    "upscale_delay_s": "models[].autoscaling.upscaleDelaySeconds",
    "downscale_delay_s": "models[].autoscaling.downscaleDelaySeconds",
    "drain_timeout_s": "drainSeconds",
    "state_dir": "storage.state",
    "admin_token_file": "auth.adminToken",
    "api_key_file": "auth.apiKeys",
    "allowed_hosts": "auth.allowedHosts",
}
"""Settings that the chart derives from other values: setting to value."""

STANDALONE_SETTINGS = (
    "ingress",
    "frontends",
    "ray_address",
    "host",
    "grpc_port",
    "http_port",
    "grpc_max_message_mib",
    "tls_cert_file",
    "tls_key_file",
)
"""Settings of `specdec serve` that have no effect if KubeRay runs Ray Serve."""

_TYPES_IN_FILES = {
    "hf_overrides": ["string", "object"],
    "lora_modules": ["string", "array", "object"],
}
"""The JSON types of settings that a configuration file may have as text or in other forms."""

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_BOUNDS = re.compile(r"a whole number from (-?\d+) to (-?\d+)")
_MAXIMUM = re.compile(r"(?:at most|from 0 to) (\d+)$")


def settings_schema() -> dict[str, Any]:
    """Return the schema of `models[].settings`."""
    excluded = {*CHART_SETTINGS, *STANDALONE_SETTINGS}
    allowed = {
        name: _schema(each) for name, each in ServeConfig.settings().items() if name not in excluded
    }
    for name, types in _TYPES_IN_FILES.items():
        allowed[name]["type"] = types
    return _object_schema(allowed)


def speculation_schema() -> dict[str, Any]:
    """Return the schema of `models[].speculativeConfig`: auto, none, or SpeculativeConfig's fields.

    The service itself also accepts other spellings of the keys.
    """
    known = {name: _field_schema(hint) for name, hint in key_types().items()}
    known["rejection_sample_method"] = {"type": "string"}
    known["num_speculative_tokens"] |= {"minimum": 1, "maximum": MAX_NUM_SPECULATIVE_TOKENS}
    own = {key: known[key] for each in METHODS.values() for key in ("method", *keys_of(each))}
    nested = {**_object_schema(own), "required": ["method"]}
    for role in OTHER_ROLES:
        known[role] = {"anyOf": [known[role], nested]}
    return {"anyOf": [{"type": "string", "enum": ["auto", "none"]}, _object_schema(known)]}


def _object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema(setting: Setting) -> dict[str, Any]:
    return {"description": setting.help, **_limits(setting.limit)}


def _limits(limit: Limit) -> dict[str, Any]:
    if limit.options:
        return {"enum": list(limit.options)}
    if limit in (FILE, DIRECTORY):
        return {"type": "string", "pattern": "^/"}
    schema: dict[str, Any] = {"type": _TYPES[limit.kind]}
    if bounds := _BOUNDS.fullmatch(limit.text):
        schema |= {"minimum": int(bounds[1]), "maximum": int(bounds[2])}
    elif limit.kind is float:
        schema |= {"minimum": 0} if limit.accepts(0.0) else {"exclusiveMinimum": 0}
        schema |= {"maximum": int(most[1])} if (most := _MAXIMUM.search(limit.text)) else {}
    elif limit.kind is str:
        schema["minLength"] = 1
    return schema


def _field_schema(hint: Any) -> dict[str, Any]:
    """Return the type alone: the service validates combinations of values."""
    options = [option for option in get_args(hint) if option is not type(None)]
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if get_origin(hint) is tuple:
        return {"type": "array"}
    if options and all(isinstance(option, str) for option in options):
        return {"enum": options}
    schemas = [_field_schema(option) for option in options]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
