"""Addresses of clients, by which strangers are limited."""

import pytest

from cluster.observability.request_context import network_of, network_of_peer


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a host", "a host"),
        ("", ""),
    ],
)
def test_the_network_that_one_client_may_have(host, network):
    assert network_of(host) == network


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("ipv4:192.0.2.7:52140", "192.0.2.7"),
        ("ipv6:%5B2001:db8::7%5D:52140", "2001:db8::/64"),
        ("ipv6:[::1]:52140", "::/64"),
        ("unix:/tmp/socket", ""),
        ("", ""),
    ],
)
def test_the_network_of_a_peer_of_grpc(peer, network):
    assert network_of_peer(peer) == network
