"""Where the commands that ask a service find it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster.api.authentication import TOKEN_VARIABLE, read_token
from specdec.client import AdminClient

DEFAULT_ADDRESS = "127.0.0.1:9000"

_Command = TypeVar("_Command", bound=Callable[..., Any])

_address = click.option(
    "--address", default=DEFAULT_ADDRESS, show_default=True, help="host:port of gRPC."
)
_tls_ca_file = click.option(
    "--tls-ca-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Certificates (PEM) that vouch for the service. Default: no TLS.",
)


def connection_flags(command: _Command) -> _Command:
    """Gives a command `address` and `tls_ca_file`."""
    return _address(_tls_ca_file(command))


API_KEY_VARIABLE = "SPECDEC_API_KEY"

api_key_flag = click.option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    help=f"API key, where the service wants one. Default: ${API_KEY_VARIABLE}, which other users "
    "of the machine cannot read.",
)


def client_flags(command: _Command) -> _Command:
    """Gives a command `address`, `tls_ca_file` and `api_key`."""
    return connection_flags(api_key_flag(command))


ADMIN_FLAG_NAMES = ("address", "tls_ca_file", "token_file", "model")

_token_file = click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"File with the operators' token. Default: ${TOKEN_VARIABLE}, or none.",
)


_model = click.option(
    "--model",
    default="",
    help="Which model it is about, where several are served. Default: the first.",
)


def admin_flags(command: _Command) -> _Command:
    """Gives a command what `admin_client` takes."""
    return connection_flags(_token_file(_model(command)))


def admin_client(
    address: str, tls_ca_file: Path | None, token_file: Path | None, model: str
) -> AdminClient:
    """A client with the operators' token, where there is one. Raises InvalidValueError."""
    token = read_token("token_file", token_file)
    return AdminClient(address, tls_ca_file=tls_ca_file, token=token, model=model)
