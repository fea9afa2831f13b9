# Modules: cluster.workers.rank.peer_connections
"""Exchange of tensors over encrypted sockets, between ranks that are threads."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat

import pytest
import torch

from cluster.workers.rank import peer_connections
from cluster.workers.rank.peer_connections import (
    MAX_MESSAGE_BYTES,
    PeerConnections,
    receive_from,
)
from cluster.workers.rank.peer_exchange import PeerExchange
from cluster.workers.transport import transport
from cluster.workers.transport.transport import connect
from specdec.kernels.collectives import OrderedCollectives
from specdec.kernels.tensor_parallel import TensorParallelGroup
from tests.specdec.models.sequences import Sequences, load, texts
from tests.specdec.tiny import tiny_llama_dir

HERE = "127.0.0.1"
TIMEOUT_S = 60.0


@contextmanager
def connected(size, timeout_s=TIMEOUT_S):
    """Yield the connections of the ranks, and their exchanges."""
    ranks = [PeerConnections(rank, HERE) for rank in range(size)]
    listening = [each.listen([other.public_key for other in ranks]) for each in ranks]
    endpoints = [[listening[at][rank - at - 1] for at in range(rank)] for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        sockets = threads.map(PeerConnections.connect, ranks, endpoints, repeat(TIMEOUT_S))
        try:
            yield ranks, [PeerExchange(rank, each, timeout_s) for rank, each in enumerate(sockets)]
        finally:
            for each in ranks:
                each.close()


def on_all(function, *arguments):
    """Call a function on every rank at once; return the results, or raise the first error."""
    with ThreadPoolExecutor(len(arguments[0])) as threads:
        return list(threads.map(function, *arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 300)])
def test_ranks_exchange_tensors(dtype, shape):
    with connected(3) as (_, exchanges):
        own = [torch.full(shape, rank + 1).to(dtype) for rank in range(3)]
        for gathered in on_all(PeerExchange.all_gather, exchanges, own):
            assert gathered.dtype == dtype
            assert torch.equal(gathered, torch.stack(own))
        parts = [torch.arange(6).view(3, 2).to(dtype) + 10 * rank for rank in range(3)]
        received = on_all(PeerExchange.all_to_all, exchanges, parts)
        for rank, each in enumerate(received):
            assert torch.equal(each, torch.stack([part[rank] for part in parts]))


def test_large_tensors_are_sent_in_parts(monkeypatch):
    """The heartbeat after a large message would come too late over a slow network."""
    sizes, send = [], transport._ZmqSocket.send

    def recorded(peer, frames):
        sizes.append(sum(map(len, frames)))
        send(peer, frames)

    monkeypatch.setattr(transport._ZmqSocket, "send", recorded)
    with connected(2) as (_, exchanges):
        groups = [OrderedCollectives(each) for each in exchanges]
        own = [torch.randn(2, 3 * 2**18 + 5) for _ in range(2)]
        for gathered in on_all(PeerExchange.all_gather, exchanges, own):
            assert torch.equal(gathered, torch.stack(own))
        for rank, received in enumerate(on_all(PeerExchange.all_to_all, exchanges, own)):
            assert torch.equal(received, torch.stack([each[rank] for each in own]))
        expected = own[0] + own[1]
        on_all(OrderedCollectives.all_reduce, groups, own)
        assert all(torch.equal(each, expected) for each in own)
    assert max(sizes) == MAX_MESSAGE_BYTES


def test_a_larger_message_ends_the_connection():
    with connected(2) as (ranks, exchanges):
        ranks[1]._sockets[0].send([bytes(MAX_MESSAGE_BYTES + 1)])
        with pytest.raises(RuntimeError, match="rank 1 has ended, or cannot be reached"):
            exchanges[0].all_gather(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_add_the_ranks_in_order_and_change_no_operand_of_a_peer(dtype):
    """Each rank adds in place while its message may not have left yet; sums are rounded once."""
    with connected(3) as (_, exchanges):
        groups = [OrderedCollectives(each, is_wide=True) for each in exchanges]
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            own = [torch.randn(8, 50, generator=generator).to(dtype) for _ in range(3)]
            expected = ((own[0].float() + own[1].float()) + own[2].float()).to(dtype)
            transposed = [each.T for each in own]
            on_all(OrderedCollectives.all_reduce, groups, transposed)
            assert all(torch.equal(each, expected) for each in own)


def test_a_model_over_sockets_computes_what_one_rank_does(tmp_path):
    """Through the native decoder, which calls back for its sums."""
    directory, (text,) = tiny_llama_dir(tmp_path, max_positions=1024), texts(1, 40)

    def logits(rank, exchange):
        group = TensorParallelGroup(rank, 3, OrderedCollectives(exchange))
        return Sequences(load(directory, 16, group=group), 16).run((0, text, 0))[0]

    with connected(3) as (_, exchanges):
        parts = on_all(logits, range(3), exchanges)
    [expected] = Sequences(load(directory, 16), 16).run((0, text, 0))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("ending", [0, 1])
def test_a_rank_that_waits_for_one_that_ends_raises(ending):
    waiting = 1 - ending
    with connected(2) as (ranks, exchanges), ThreadPoolExecutor(1) as thread:
        result = thread.submit(exchanges[waiting].all_gather, torch.ones(3))
        receive_from(waiting, ranks[ending]._sockets[waiting], TIMEOUT_S)
        ranks[ending].close()
        with pytest.raises(RuntimeError, match=f"rank {ending} has ended, or cannot be reached"):
            result.result(30)
        with pytest.raises(RuntimeError, match=f"rank {ending} "):
            exchanges[waiting].all_gather(torch.ones(3))


@pytest.mark.parametrize("shapes", [(3, 4), (3, 3)])
def test_another_collective_or_a_lost_message_is_an_error(shapes):
    with connected(2) as (_, exchanges):
        exchanges[1]._count += shapes[0] == shapes[1]
        with pytest.raises(RuntimeError, match=r"rank \d called another collective than this rank"):
            on_all(PeerExchange.all_gather, exchanges, [torch.ones(each) for each in shapes])


def test_a_rank_that_sends_nothing_is_an_error():
    with (
        connected(2, timeout_s=0.2) as (_, exchanges),
        pytest.raises(RuntimeError, match=r"rank 1 has sent nothing within 0\.2 s"),
    ):
        exchanges[0].all_gather(torch.ones(3))


def test_a_rank_that_does_not_connect_is_an_error():
    first, second = (PeerConnections(rank, HERE) for rank in range(2))
    first.listen([b"", second.public_key])
    with pytest.raises(RuntimeError, match="rank 1 has sent nothing within"):
        first.connect([], 0.2)
    first.close()
    second.close()


def test_a_rank_that_ends_before_its_first_message_is_an_error():
    first, second = (PeerConnections(rank, HERE) for rank in range(2))
    [endpoint] = first.listen([b"", second.public_key])
    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(first.connect, [], TIMEOUT_S)
        peer = connect(second._context, endpoint, second._keys, 0.0)
        while peer._monitor._peers is None:  # its handshake
            peer.poll_lost()
        peer.close()
        with pytest.raises(RuntimeError, match="rank 1 has ended, or cannot be reached"):
            connecting.result(30)
    first.close()
    second.close()


def test_connections_of_strangers_leave_no_events_at_a_rank_that_waits(monkeypatch):
    monkeypatch.setattr(peer_connections, "_DRAIN_PERIOD_S", 0.05)
    num_events, are_processed, follow = [], threading.Event(), transport._Monitor._follow

    def counted(monitor, message):
        num_events.append(message["event"])
        follow(monitor, message)
        if len(num_events) >= 20:
            are_processed.set()

    monkeypatch.setattr(transport._Monitor, "_follow", counted)
    first, second = (PeerConnections(rank, HERE) for rank in range(2))
    [endpoint] = first.listen([b"", second.public_key])
    host, port = endpoint.address.removeprefix("tcp://").split(":")
    for _ in range(20):
        socket.create_connection((host, int(port))).close()
    assert are_processed.wait(30)
    first.close()
    second.close()


def test_ranks_listen_on_the_address_of_their_node_alone():
    first, second = (PeerConnections(rank, HERE) for rank in range(2))
    [endpoint] = first.listen([b"", second.public_key])
    assert endpoint.address.startswith(f"tcp://{HERE}:")
    assert second.listen([b"", b""]) == []
    host, _ = first.open_store()
    assert host == HERE == first.store.getsockname()[0]
    first.close()
    second.close()
