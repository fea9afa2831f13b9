"""Rendezvous of ranks on the GPUs of several nodes, in one process."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from cluster.workers.rank.gpu_store import join_store, use_interface_of
from cluster.workers.rank.peer_connections import PeerConnections

HERE = "127.0.0.1"
TIMEOUT = timedelta(seconds=20)
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def test_ranks_meet_where_rank_0_listens():
    connections = PeerConnections(0, HERE)
    place = connections.open_store()
    with ThreadPoolExecutor(2) as threads:
        joins = [
            threads.submit(join_store, place, 2, listener, TIMEOUT)
            for listener in (connections.store, None)
        ]
        first, second = (each.result() for each in joins)
    first.set("key", "value")
    assert second.get("key") == b"value"
    connections.close()


@pytest.mark.parametrize(
    ("address", "given", "expected"),
    [
        (HERE, None, ["lo", "=lo"]),
        (HERE, "eth7", ["eth7", "=lo"]),
        ("203.0.113.1", None, [None, None]),
    ],
)
def test_the_interface_is_that_of_the_node_unless_the_environment_names_one(
    monkeypatch, caplog, address, given, expected
):
    for each in VARIABLES:
        monkeypatch.setenv(each, "")
        monkeypatch.delenv(each)
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    use_interface_of(address)
    assert [os.environ.get(each) for each in VARIABLES] == expected
    assert ("no interface has the address 203.0.113.1" in caplog.text) == (address != HERE)
