"""Connection flags of the commands that call a service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster.api.admin_token import TOKEN_VARIABLE, read_token
from specdec.client import AdminClient

DEFAULT_ADDRESS = "127.0.0.1:9000"

_Command = TypeVar("_Command", bound=Callable[..., Any])

_address = click.option(
    "--address",
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="host:port of the service's gRPC API.",
)
_tls_ca_file = click.option(
    "--tls-ca-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="CA certificates (PEM) to verify the service with. Default: no TLS.",
)


def connection_flags(command: _Command) -> _Command:
    """Add --address and --tls-ca-file to a command."""
    return _address(_tls_ca_file(command))


API_KEY_VARIABLE = "SPECDEC_API_KEY"

api_key_flag = click.option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    help=f"API key of the service. Default: ${API_KEY_VARIABLE}, which other users of the machine "
    "cannot read.",
)


def client_flags(command: _Command) -> _Command:
    """Add --address, --tls-ca-file and --api-key to a command."""
    return connection_flags(api_key_flag(command))


ADMIN_FLAG_NAMES = ("address", "tls_ca_file", "token_file", "model")

_token_file = click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"File with the admin token. Default: ${TOKEN_VARIABLE}, or none.",
)


_model = click.option(
    "--model",
    default="",
    help="Model to address, if several are served. Default: the first.",
)


def admin_flags(command: _Command) -> _Command:
    """Add the flags of `admin_client` to a command."""
    return connection_flags(_token_file(_model(command)))


def admin_client(
    address: str, tls_ca_file: Path | None, token_file: Path | None, model: str
) -> AdminClient:
    """Create an admin client with the token, if there is one. Raises InvalidValueError."""
    token = read_token("token_file", token_file)
    return AdminClient(address, tls_ca_file=tls_ca_file, token=token, model=model)
