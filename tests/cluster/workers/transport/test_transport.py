# Modules: cluster.workers.transport.unix_socket
"""Sockets between the Router and a worker."""

import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from cluster.workers.transport import transport
from cluster.workers.transport.transport import CurveKeys, Endpoint, Listener, connect
from cluster.workers.transport.unix_socket import PeerGoneError, UnixSocket, parent_of_sockets
from tests.cluster.ipv6 import NEEDS_IPV6

TIMEOUT_MS = 30_000
TIMEOUT_S = 30.0
SHORT_S = 0.2


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def listen(tmp_path):
    opened = []

    def open_listener(transport, peer_public_key, host="127.0.0.1", **options):
        path = tmp_path / "steps"
        opened.append(Listener(transport, host, peer_public_key, path, **options))
        return opened[-1]

    yield open_listener
    for listener in opened:
        listener.close()


def is_ready(end, timeout_ms=TIMEOUT_MS):
    poller = zmq.Poller()
    poller.register(end.pollable, zmq.POLLIN)
    return [pollable for pollable, _ in poller.poll(timeout_ms)] == [end.pollable]


def received(end):
    return end.receive() if is_ready(end) else None


@pytest.fixture
def timeout_s():
    return TIMEOUT_S


@pytest.fixture
def pair(context, listen, timeout_s):
    """Both ends of a Unix socket: the Router's and the worker's."""
    keys = CurveKeys.generate()
    listener = listen("ipc", keys.public)
    router = connect(context, listener.endpoint, keys, timeout_s)
    yield router, listener.accept()
    router.close()


@pytest.mark.parametrize(
    ("transport", "host"),
    [("ipc", ""), ("tcp", "127.0.0.1"), pytest.param("tcp", "::1", marks=NEEDS_IPV6)],
)
def test_messages_arrive_whole_and_in_order(context, listen, transport, host):
    keys = CurveKeys.generate()
    listener = listen(transport, keys.public, host)
    router = connect(context, listener.endpoint, keys, TIMEOUT_S)
    worker = listener.accept()
    messages = [[b"header %d" % i, b"", b"x" * 1000 * i] for i in range(10)]
    for message in messages:
        router.send(message)
    assert [received(worker) for _ in messages] == messages
    worker.send([b"answer"])
    assert received(router) == [b"answer"]
    router.send_last([b"stop"])
    assert received(worker) == [b"stop"]


@pytest.mark.parametrize("who", ["another key", "no key at all"])
def test_messages_of_another_client_are_dropped_over_tcp(context, listen, who):
    router, stranger = CurveKeys.generate(), CurveKeys.generate()
    listener = listen("tcp", router.public)
    endpoint = listener.endpoint if who == "another key" else Endpoint(listener.endpoint.address)
    theirs = connect(context, endpoint, stranger, TIMEOUT_S)
    theirs.send([b"stop"])  # a socket that is not referenced any more drops its messages
    assert not is_ready(listener.accept(), 1000)
    theirs.close()


def send_raw(endpoint, data):
    """Send bytes to a TCP endpoint without a handshake, and return the open connection."""
    host, _, port = endpoint.address.removeprefix("tcp://").rpartition(":")
    stranger = socket.create_connection((host, int(port)), timeout=5)
    stranger.sendall(data)
    return stranger


@pytest.mark.parametrize("polls_lost", [False, True])
@pytest.mark.parametrize("connects_first", [True, False])
def test_the_router_is_served_whatever_a_stranger_sends_over_tcp(
    context, listen, connects_first, polls_lost
):
    """More connections than a monitor keeps by default: 2000 events, two for each."""
    router, other = CurveKeys.generate(), CurveKeys.generate()
    listener = listen("tcp", router.public, polls_lost=polls_lost)
    for _ in range(2000):
        send_raw(listener.endpoint, b"\xff").close()
    mine = None if connects_first else connect(context, listener.endpoint, router, TIMEOUT_S)
    with send_raw(listener.endpoint, b"\xff" * 4096), send_raw(listener.endpoint, bytes(4096)):
        theirs = connect(context, listener.endpoint, other, TIMEOUT_S)
        theirs.send([b"stop"])
        time.sleep(0.3)
        mine = mine or connect(context, listener.endpoint, router, TIMEOUT_S)
        mine.send([b"a step"])
        worker = listener.accept()
        assert received(worker) == [b"a step"]
        worker.send([b"an answer"])
        assert received(mine) == [b"an answer"]
        assert not is_ready(worker, 300), "nothing of the stranger arrives"
        theirs.close()
        assert not worker.poll_lost(), "the stranger has ended, not the router"
        assert not mine.poll_lost()


def test_an_impostor_at_the_address_of_a_worker_receives_no_step(context, listen):
    router, worker = CurveKeys.generate(), CurveKeys.generate()
    with_another_key = listen("tcp", router.public)
    without_keys = context.socket(zmq.PAIR)
    port = without_keys.bind_to_random_port("tcp://127.0.0.1")
    for address in (with_another_key.endpoint.address, f"tcp://127.0.0.1:{port}"):
        mine = connect(context, Endpoint(address, worker.public), router, TIMEOUT_S)
        mine.send([b"a step"])
        assert not is_ready(with_another_key.accept(), 500)
        assert not without_keys.poll(500)
        mine.close()


def test_a_step_is_encrypted_between_nodes(context, listen):
    keys = CurveKeys.generate()
    listener = listen("tcp", keys.public)
    relay = Relay(listener.endpoint.address)
    step = b"the quick brown fox jumps over the lazy dog"
    seen = Endpoint(relay.address, listener.endpoint.public_key)
    router = connect(context, seen, keys, TIMEOUT_S)
    router.send([step])
    assert received(listener.accept()) == [step]
    assert relay.copied
    assert step not in relay.copied
    router.close()
    relay.close()


def test_the_secret_key_is_not_in_the_representation():
    keys = CurveKeys.generate()
    assert keys.secret.decode() not in repr(keys)


def test_the_ipc_socket_is_at_the_given_path(listen, tmp_path):
    listener = listen("ipc", CurveKeys.generate().public)
    assert [path.name for path in tmp_path.iterdir()] == ["steps"]
    assert listener.endpoint == Endpoint(f"ipc://{tmp_path / 'steps'}")


def test_no_other_process_can_connect_after_the_router(context, listen):
    keys = CurveKeys.generate()
    listener = listen("ipc", keys.public)
    connect(context, listener.endpoint, keys, TIMEOUT_S)
    listener.accept()
    with pytest.raises(ConnectionRefusedError):
        connect(context, listener.endpoint, keys, TIMEOUT_S)


def test_a_message_larger_than_the_kernel_holds_arrives_whole(pair):
    router, worker = pair
    message = [bytes(8 * 2**20), b"end"]
    sender = threading.Thread(target=router.send, args=(message,))
    sender.start()
    assert received(worker) == message
    sender.join()


@pytest.mark.parametrize("timeout_s", [SHORT_S])
def test_sending_to_a_peer_that_does_not_read_times_out(pair):
    router, _ = pair
    with pytest.raises(TimeoutError):
        router.send([bytes(8 * 2**20)])
    began_at_s, count = time.monotonic(), 100
    for _ in range(count):
        router.send_last([b"stop"])  # neither waits nor raises
    assert time.monotonic() - began_at_s < count * SHORT_S / 2


def test_receiving_an_incomplete_message_times_out(listen):
    listener = listen("ipc", CurveKeys.generate().public)
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(listener.endpoint.address.removeprefix("ipc://"))
    receiver = UnixSocket(listener.accept()._socket, SHORT_S)
    peer.sendall(b"\x10\0\0")
    with pytest.raises(TimeoutError):
        receiver.receive()
    peer.close()


def test_a_peer_that_has_closed_is_detected_by_both_calls(pair):
    router, worker = pair
    worker.close()
    with pytest.raises(PeerGoneError):
        received(router)
    with pytest.raises(PeerGoneError):
        router.send([b"step"])
    router.send_last([b"stop"])


class Relay:
    """Relay between two ends, which can drop everything silently."""

    def __init__(self, address):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.copied = bytearray()
        self._works = threading.Event()
        self._works.set()
        self._open = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def fail(self):
        self._works.clear()

    def close(self):
        for each in self._open:
            each.close()

    def _accept(self):
        with suppress(OSError):
            here, _ = self._server.accept()
            there = socket.create_connection(self._target)
            self._open += [here, there]
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                self.copied += data
                if self._works.is_set():
                    sink.sendall(data)


@pytest.fixture
def relayed(context, listen, monkeypatch):
    """The Router's end over TCP, the worker's, and the network between them."""
    monkeypatch.setattr(transport, "_HEARTBEAT_INTERVAL_MS", 50)
    monkeypatch.setattr(transport, "_HEARTBEAT_TIMEOUT_MS", 1000)
    keys = CurveKeys.generate()
    listener = listen("tcp", keys.public, polls_lost=True)
    relay = Relay(listener.endpoint.address)
    endpoint = Endpoint(relay.address, listener.endpoint.public_key)
    router = connect(context, endpoint, keys, TIMEOUT_S)
    worker = listener.accept()
    router.send([b"hello"])
    assert received(worker) == [b"hello"]
    yield router, worker, relay
    router.close()
    relay.close()


def test_a_worker_that_is_silent_for_long_is_not_mistaken_for_a_lost_one(relayed):
    """A background thread of its process sends heartbeats while it computes."""
    router, worker, _ = relayed
    time.sleep(1.5)
    assert not router.poll_lost()
    assert not worker.poll_lost()
    worker.send([b"done"])
    assert received(router) == [b"done"]


def wait_until_lost(end):
    began_at = time.monotonic()
    while not end.poll_lost():
        assert time.monotonic() - began_at < 30.0
        time.sleep(0.01)


def test_a_network_that_fails_is_noticed_by_both_ends_while_nothing_is_sent(relayed):
    router, worker, relay = relayed
    relay.fail()
    for end in (router, worker):
        wait_until_lost(end)
        end.close()
        assert end.poll_lost(), "a loss is permanent"


def test_a_worker_notices_over_tcp_that_its_router_has_ended(relayed):
    router, worker, relay = relayed
    relay.close()
    router.close()
    wait_until_lost(worker)
    with pytest.raises(PeerGoneError):
        worker.send([b"answer"])
    worker.send_last([b"answer"])


def test_the_real_limits_let_it_be_noticed_within_ten_seconds():
    """Serve checks health every 3 s, which checks the sockets."""
    health_check_s = 3.0
    limit_s = (transport._HEARTBEAT_INTERVAL_MS + transport._HEARTBEAT_TIMEOUT_MS) / 1000
    assert limit_s + health_check_s < 10.0


@pytest.mark.parametrize("length", [20, 60, 61, 200])
def test_a_socket_has_room_where_temporary_files_have_a_long_path(monkeypatch, length):
    given = f"/tmp/{'d' * length}"[:length]
    monkeypatch.setattr(tempfile, "tempdir", given)
    parent = parent_of_sockets()
    assert parent == (given if length <= 60 else "/tmp")
    Path(given).mkdir()
    try:
        own = tempfile.TemporaryDirectory(prefix="specdec-seats-", dir=parent)
        with own as directory, socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{directory}/seat-{10**9}")
    finally:
        Path(given).rmdir()
