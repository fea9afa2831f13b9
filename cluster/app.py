"""Builds the service as a Ray Serve application, for an existing Ray cluster or KubeRay.

A Serve config file refers to it as `import_path: cluster.app:build`, once for each model; `args`
has the keys of the configuration file of `specdec serve --config`. The builder reads model files at
most from a directory on its node: Serve may run it on any node, and the models are on other nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from cluster.config.serve_config import ServeConfig
from cluster.config.vllm_compat import our_name
from cluster.serve.application import make_application
from specdec.types.errors import InvalidValueError

_OF_SERVE = ("host", "http_port", "grpc_port")
_OF_OUR_SERVERS = ("tls_cert_file", "tls_key_file")
_REFUSED = {
    **dict.fromkeys(
        _OF_SERVE, "left out; set http_options and grpc_options of the Serve config instead"
    ),
    **dict.fromkeys(_OF_OUR_SERVERS, "left out; terminate TLS in a proxy before Serve's ingress"),
    "grpc_max_message_mib": "left out; set RAY_SERVE_GRPC_MAX_MESSAGE_SIZE, in bytes, in the "
    "environment of ray start instead",
    "ray_address": "left out; the application runs on the cluster of Serve",
}


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application of one model: its replicas and its ControlPlane.

    args: settings, by our names or vLLM's. Raises InvalidValueError for an unknown or unsupported
    key.
    """
    return make_application(ServeConfig.from_sources(application_settings(args)))


def application_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in `args` with ingress serve. Raises InvalidValueError."""
    for key, value in args.items():
        if (limit := _REFUSED.get(our_name(key))) is not None:
            raise InvalidValueError(key, value, limit)
    if args.get("ingress", "serve") != "serve":
        raise InvalidValueError("ingress", args["ingress"], "serve, or left out")
    if args.get("device") == "auto":
        limit = "cpu or cuda: the models may run on another node than the builder"
        raise InvalidValueError("device", "auto", limit)
    return {**args, "ingress": "serve"}
