"""Headers, address and caller of the current request, in context variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from starlette.types import Scope

from specdec.types.request import OWN_PROCESS, Caller

Headers = Iterable[tuple[str | bytes, str | bytes]]


def _none() -> Headers:
    return ()


current_headers: ContextVar[Callable[[], Headers]] = ContextVar("headers", default=_none)
"""Returns the HTTP headers or gRPC metadata of the call that the current task serves.

Set where a call arrives; evaluated only when the headers are needed.
"""

current_address: ContextVar[Callable[[], str]] = ContextVar("address", default=str)
"""Returns the network address of the client of that call; empty if it is not known."""

current_caller: ContextVar[Caller] = ContextVar("caller", default=OWN_PROCESS)
"""The client of that call, by which grammars are compiled in turn."""


def keep_headers(scope: Scope) -> None:
    """Store headers and address of an HTTP request in the variables."""
    current_headers.set(lambda: scope["headers"])
    host, _ = scope.get("client") or ("", 0)
    current_address.set(lambda: network_of(host))


def text_headers(names: Iterable[str]) -> dict[str, str]:
    """Return the current call's headers with these names, which are in lower case.

    One that occurs several times has all different values, separated by commas (RFC 9110).
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    for name, value in current_headers.get()():
        if (values := found.get(_text(name).lower())) is not None:
            values.append(_text(value))
    return {name: ",".join(dict.fromkeys(values)) for name, values in found.items() if values}


@lru_cache(maxsize=128)
def network_of(host: str) -> str:
    """Return the network that one client may have: an address, or the /64 of an IPv6 address."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    mapped = address.ipv4_mapped
    return f"{IPv6Address(int(address) >> 64 << 64)}/64" if mapped is None else str(mapped)


@lru_cache(maxsize=128)
def network_of_peer(peer: str) -> str:
    """Return `network_of` the host in grpc's name of a peer, such as ipv6:%5B::1%5D:52140."""
    _, _, host_and_port = unquote(peer).partition(":")
    return network_of(host_and_port.rpartition(":")[0].strip("[]"))


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
