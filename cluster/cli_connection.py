"""Where the commands that ask a service find it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

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
