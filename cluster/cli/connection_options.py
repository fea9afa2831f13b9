"""Connection flags of the commands that call a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cluster.api.admin_token import TOKEN_VARIABLE, read_token
from cluster.cli.help import combine_flags
from specdec.client import AdminClient
from specdec.client.calls import DEFAULT_TIMEOUT_S

DEFAULT_ADDRESS = "127.0.0.1:9000"
API_KEY_VARIABLE = "SPECDEC_API_KEY"
ADMIN_FLAG_NAMES = ("address", "tls_ca_file", "token_file", "model")

_CLIENT_ARGUMENTS = ("address", "timeout_s", "tls_ca_file", "api_key")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

_address = click.option(
    "--address",
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="host:port of the service's gRPC API.",
)
tls_ca_flag = click.option(
    "--tls-ca-file",
    type=_FILE,
    help="CA certificates (PEM) to verify the service with. Default: no TLS.",
)
api_key_flag = click.option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    help=f"API key of the service. Default: ${API_KEY_VARIABLE}, which, unlike a flag, is not "
    "visible in the process list.",
)
timeout_flag = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    help="Timeout of the request in seconds.",
)
client_flags = combine_flags(_address, tls_ca_flag, api_key_flag)
admin_flags = combine_flags(
    _address,
    tls_ca_flag,
    click.option(
        "--token-file",
        type=_FILE,
        help=f"File with the admin token. Default: ${TOKEN_VARIABLE}, or none.",
    ),
    click.option(
        "--model", default="", help="Model to address, if several are served. Default: the first."
    ),
)


def pop_connection(flags: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of `specdec.client.Client` from `flags` and return them."""
    return {name: flags.pop(name) for name in _CLIENT_ARGUMENTS if name in flags}


def admin_client(
    address: str, tls_ca_file: Path | None, token_file: Path | None, model: str
) -> AdminClient:
    """Create an admin client with the token, if there is one. Raises InvalidValueError."""
    token = read_token("token_file", token_file)
    return AdminClient(address, tls_ca_file=tls_ca_file, token=token, model=model)
