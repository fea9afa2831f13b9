"""Checks and formatting of listen addresses."""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import lru_cache
from pathlib import Path

from specdec.config.fields import Limit, optional
from specdec.types.errors import InvalidValueError

ANY_HOST = "*"

_HOST = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")


def listen_error(host: str, port: int) -> OSError | None:
    """Return the error of binding to an address, or None if it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens; on `::` for IPv4 too, as gRPC does. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=takes_ipv4_too(host))


def takes_ipv4_too(host: str) -> bool:
    """Return whether a host is `::`, in any spelling."""
    try:
        return ":" in host and ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise InvalidValueError for a certificate that does not load, or not with this key."""
    if certificate is None:
        return
    import ssl  # most services have no certificate

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, _no_pass_phrase)
    except (OSError, ValueError) as error:  # OSError is the base of SSLError
        limit = f"a certificate in PEM that belongs to tls_key_file, both readable ({error})"
        raise InvalidValueError("tls_cert_file", str(certificate), limit) from error


def _no_pass_phrase() -> str:
    raise ValueError("the key is encrypted")  # OpenSSL would ask on the terminal


def address_of(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_names(text: str) -> tuple[str, ...]:
    """Parse names such as "llm.example.com,*.internal", or "*". Raises ValueError."""
    names = tuple(each.strip().lower() for each in text.split(","))
    if not all(each == ANY_HOST or is_ip_address(each) or _HOST.fullmatch(each) for each in names):
        raise ValueError(text)
    return names


@lru_cache(maxsize=128)  # every request is addressed to one
def is_ip_address(host: str) -> bool:
    """Return whether a host is an address instead of a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _are_host_names(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(host_names(value))
    except ValueError:
        return False


HOSTS = optional(
    Limit("host names without ports, such as llm.example.com,*.internal, or *", _are_host_names)
)


def is_loopback(host: str) -> bool:
    """Return whether a host is localhost or a loopback address; other names are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
