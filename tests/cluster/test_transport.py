"""Sockets between the Router and a shard."""

import threading

import pytest
import zmq

from cluster.transport import CurveKeys, Endpoint, Listener, connect
from cluster.unix_socket import PeerGoneError

TIMEOUT_MS = 3000
SEND_TIMEOUT_S = 0.2


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def listen(tmp_path):
    opened = []

    def open_listener(transport, peer_public_key):
        opened.append(Listener(transport, "127.0.0.1", peer_public_key, tmp_path / "steps"))
        return opened[-1]

    yield open_listener
    for listener in opened:
        listener.close()


def is_ready(socket, timeout_ms=TIMEOUT_MS):
    poller = zmq.Poller()
    poller.register(socket.pollable, zmq.POLLIN)
    return [pollable for pollable, _ in poller.poll(timeout_ms)] == [socket.pollable]


def received(socket):
    return socket.receive() if is_ready(socket) else None


@pytest.fixture
def pair(context, listen):
    """Both ends of a Unix socket: the Router's, and the shard's."""
    keys = CurveKeys.generate()
    listener = listen("ipc", keys.public)
    router = connect(context, listener.endpoint, keys, SEND_TIMEOUT_S)
    yield router, listener.accept()
    router.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_messages_arrive_whole_and_in_order(context, listen, transport):
    keys = CurveKeys.generate()
    listener = listen(transport, keys.public)
    router = connect(context, listener.endpoint, keys, SEND_TIMEOUT_S)
    shard = listener.accept()
    messages = [[b"header %d" % i, b"", b"x" * 1000 * i] for i in range(10)]
    for message in messages:
        router.send(message)
    assert [received(shard) for _ in messages] == messages
    shard.send([b"answer"])
    assert received(router) == [b"answer"]
    router.send_last([b"stop"])
    assert received(shard) == [b"stop"]


@pytest.mark.parametrize("who", ["another key", "no key at all"])
def test_a_stranger_is_not_heard_over_tcp(context, listen, who):
    router, stranger = CurveKeys.generate(), CurveKeys.generate()
    listener = listen("tcp", router.public)
    endpoint = listener.endpoint if who == "another key" else Endpoint(listener.endpoint.address)
    connect(context, endpoint, stranger, SEND_TIMEOUT_S).send([b"stop"])
    assert not is_ready(listener.accept(), 1000)


def test_the_ipc_socket_is_where_it_was_told(listen, tmp_path):
    listener = listen("ipc", CurveKeys.generate().public)
    assert [path.name for path in tmp_path.iterdir()] == ["steps"]
    assert listener.endpoint == Endpoint(f"ipc://{tmp_path / 'steps'}")


def test_nobody_else_gets_in_once_the_router_has(context, listen):
    keys = CurveKeys.generate()
    listener = listen("ipc", keys.public)
    connect(context, listener.endpoint, keys, SEND_TIMEOUT_S)
    listener.accept()
    with pytest.raises(ConnectionRefusedError):
        connect(context, listener.endpoint, keys, SEND_TIMEOUT_S)


def test_a_message_larger_than_the_kernel_holds_arrives_whole(pair):
    router, shard = pair
    message = [bytes(8 * 2**20), b"end"]
    sender = threading.Thread(target=router.send, args=(message,))
    sender.start()
    assert received(shard) == message
    sender.join()


def test_a_peer_that_takes_nothing_is_not_waited_for_longer_than_told(pair):
    router, _ = pair
    with pytest.raises(TimeoutError):
        router.send([bytes(8 * 2**20)])
    router.send_last([b"stop"])  # neither waits nor raises


def test_a_peer_that_has_closed_is_known_at_both_calls(pair):
    router, shard = pair
    shard.close()
    with pytest.raises(PeerGoneError):
        received(router)
    with pytest.raises(PeerGoneError):
        router.send([b"step"])
    router.send_last([b"stop"])
