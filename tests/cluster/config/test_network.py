"""Formatting of addresses, and loopback addresses."""

import pytest

from cluster.config.network import address_of, is_loopback


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:90"), ("::1", "[::1]:90"), ("localhost", "localhost:90")],
)
def test_an_ipv6_address_has_brackets(host, address):
    assert address_of(host, 90) == address


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        *((host, True) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "inference.example")),
    ],
)
def test_loopback_addresses(host, is_local):
    assert is_loopback(host) is is_local
