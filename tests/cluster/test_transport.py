"""Sockets between the Router and a shard."""

import pytest
import zmq

from cluster.transport import Connection, CurveKeys, Endpoint, Listener

TIMEOUT_MS = 3000


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


def received(socket):
    return socket.recv_multipart() if socket.poll(TIMEOUT_MS) else None


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_messages_arrive_whole_and_in_order(context, listen, transport):
    keys = CurveKeys.generate()
    listener = listen(transport, keys.public)
    connection = Connection(context, listener.endpoint, keys)
    messages = [[b"header %d" % i, b"x" * 1000 * i] for i in range(10)]
    for message in messages:
        connection.socket.send_multipart(message)
    assert [received(listener.socket) for _ in messages] == messages
    listener.socket.send_multipart([b"answer"])
    assert received(connection.socket) == [b"answer"]


@pytest.mark.parametrize("who", ["another key", "no key at all"])
def test_a_stranger_is_not_heard_over_tcp(context, listen, who):
    router, stranger = CurveKeys.generate(), CurveKeys.generate()
    listener = listen("tcp", router.public)
    endpoint = listener.endpoint if who == "another key" else Endpoint(listener.endpoint.address)
    connection = Connection(context, endpoint, stranger)
    connection.socket.send_multipart([b"stop"])
    assert listener.socket.poll(1000) == 0


def test_the_ipc_socket_is_where_it_was_told(listen, tmp_path):
    listener = listen("ipc", CurveKeys.generate().public)
    assert [path.name for path in tmp_path.iterdir()] == ["steps"]
    assert listener.endpoint == Endpoint(f"ipc://{tmp_path / 'steps'}")
