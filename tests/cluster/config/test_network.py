"""Formatting of addresses, and loopback addresses."""

import socket

import pytest

from cluster.config.network import (
    HOSTS,
    address_of,
    host_names,
    is_loopback,
    listening_socket,
)
from tests.cluster.ipv6 import NEEDS_IPV6


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:90"), ("::1", "[::1]:90"), ("localhost", "localhost:90")],
)
def test_an_ipv6_address_has_brackets(host, address):
    assert address_of(host, 90) == address


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("127.0.0.1", "127.0.0.1"),
        *(
            pytest.param(host, client, marks=NEEDS_IPV6)
            for host, client in (("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1"))
        ),
        pytest.param("0:0:0:0:0:0:0:0", "127.0.0.1", marks=NEEDS_IPV6),
        pytest.param("::0.0.0.0", "127.0.0.1", marks=NEEDS_IPV6),
    ],
)
def test_the_unspecified_ipv6_address_takes_ipv4_too(host, client):
    with (
        listening_socket(host, 0) as listening,
        socket.create_connection((client, listening.getsockname()[1]), 30),
    ):
        listening.accept()[0].close()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        *((host, True) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "inference.example")),
    ],
)
def test_loopback_addresses(host, is_local):
    assert is_loopback(host) is is_local


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("*", ("*",)),
        ("Llm.Example.com, *.internal", ("llm.example.com", "*.internal")),
        ("10.0.0.1,::1,my_service", ("10.0.0.1", "::1", "my_service")),
    ],
)
def test_host_names_are_parsed(text, names):
    assert host_names(text) == names


@pytest.mark.parametrize("text", ["", "a,,b", "llm.example.com:80", "http://a", "a b", "a.*", "*a"])
def test_what_is_no_host_name_is_rejected(text):
    assert not HOSTS.accepts(text)
