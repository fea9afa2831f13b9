"""Socket calls that return at once and keep the interpreter lock."""

import socket

import pytest

from cluster.workers.transport.brief_calls import receive_now, send_now


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_what_was_sent_is_received(pair):
    left, right = (each.fileno() for each in pair)
    assert send_now(left, b"a message") == 9
    data = bytearray(20)
    assert receive_now(right, data) == 9
    assert data == b"a message" + bytes(11)


def test_what_has_no_room_is_left(pair):
    left, right = (each.fileno() for each in pair)
    most = send_now(left, bytes(2**24))
    assert 0 < most < 2**24
    assert send_now(left, b"more") == 0
    assert receive_now(right, bytearray(2**24)) == most


def test_nothing_is_received_where_nothing_can_be(pair):
    left, right = pair
    assert receive_now(right.fileno(), bytearray(8)) == 0
    left.close()
    assert receive_now(right.fileno(), bytearray(8)) == 0
    assert send_now(right.fileno(), b"too late") == 0
    assert send_now(-1, b"nowhere") == receive_now(-1, bytearray(8)) == 0
