"""Addresses that clients connect to, and certificates that they trust."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.types.errors import InvalidValueError

if TYPE_CHECKING:
    from ssl import SSLContext

_PREFIXES = ("ipv4:", "ipv6:", "dns:")  # of gRPC's targets


def bypasses_proxy(address: str) -> bool:
    """Return whether a connection must not use a proxy: the address is on this machine.

    address: host:port, a URL or a target of gRPC. The variables http_proxy, https_proxy and
    all_proxy, in both cases, name a proxy for other machines; on loopback it would reach itself.
    Names other than localhost are not resolved.
    """
    name = _host(address).lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        host = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return (mapped or host).is_loopback or (mapped or host).is_unspecified


def trusting(field: str, ca_file: Path | str) -> tuple[SSLContext, bytes]:
    """Return a context that trusts the certificates of a file, and their text.

    The file is read once, since it may be a pipe. Raises InvalidValueError.
    """
    import ssl  # most services have no certificate

    try:
        text = Path(ca_file).read_bytes().decode("ascii", "ignore")  # without a byte order mark
        # Without any text, the system's certificates would be trusted.
        return ssl.create_default_context(cadata=text or "-"), text.encode()
    except OSError as error:  # the base of SSLError
        limit = "a readable file of certificates (PEM)"
        raise InvalidValueError(field, str(ca_file), limit) from error


def _host(address: str) -> str:
    for prefix in _PREFIXES:
        address = address.removeprefix(prefix)
    authority = address.split("://")[-1].lstrip("/").split("/")[0].rsplit("@")[-1]
    if authority.startswith("["):
        return authority[1:].split("]")[0]
    return authority.split(":")[0] if authority.count(":") == 1 else authority
