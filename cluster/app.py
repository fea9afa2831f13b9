"""The service as an application of Ray Serve, for whoever runs Ray and Serve themselves.

A Serve config file names it as `import_path: cluster.app:build`, once for each model, and says in
`args` what `specdec serve --config` would say. Nothing of a model is looked at here: this runs
where Serve pleases, and the models on nodes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from cluster.config.serve_config import ServeConfig
from cluster.config.vllm_settings import our_name
from cluster.serve.deployment import make_application
from specdec.types.errors import InvalidValueError

_OF_SERVE = ("host", "http_port", "grpc_port", "grpc_max_message_mib")
_OF_OUR_SERVERS = ("tls_cert_file", "tls_key_file")
_REFUSED = {
    **dict.fromkeys(
        _OF_SERVE, "left out; http_options and grpc_options of the Serve config say it"
    ),
    **dict.fromkeys(
        _OF_OUR_SERVERS, "left out; what stands before Serve's ingress has to speak TLS"
    ),
    "ray_address": "left out; it runs where Serve does",
}


def build(args: dict[str, Any]) -> serve.Application:
    """One model with its replicas and its ControlPlane. `args`: settings, in our words or vLLM's.

    Raises InvalidValueError for a key that is unknown, or that has no meaning here.
    """
    return make_application(ServeConfig.from_sources(application_settings(args)))


def application_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """What `args` mean on a Serve of somebody else's. Raises InvalidValueError."""
    for key, value in args.items():
        if (limit := _REFUSED.get(our_name(key))) is not None:
            raise InvalidValueError(key, value, limit)
    if args.get("ingress", "serve") != "serve":
        raise InvalidValueError("ingress", args["ingress"], "serve, or left out")
    if args.get("device") == "auto":
        limit = "cpu or cuda: the models may run on another node than the one that reads this"
        raise InvalidValueError("device", "auto", limit)
    return {**args, "ingress": "serve"}
