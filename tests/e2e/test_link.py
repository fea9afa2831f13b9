"""Tests of the relay between two devices, for which pairs of datagram sockets stand in."""

import fcntl
import json
import os
import socket
import sys
import termios
import threading
import time
from contextlib import suppress
from dataclasses import asdict

import pytest

from tests.e2e.link import Relay
from tests.waiting import wait_until

NUM_PACKETS = 200


@pytest.fixture
def ends():
    """Return both outer ends, and a function that puts a condition in force."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    for outer, inner in pairs:
        outer.settimeout(5)
        inner.setblocking(False)
    commands, sender = os.pipe()
    relay = Relay(*(inner.fileno() for _, inner in pairs))
    thread = threading.Thread(target=relay.run, args=(commands,))
    thread.start()

    def condition(**values):
        before = relay._condition
        os.write(sender, json.dumps(asdict(before) | values).encode())
        wait_until(lambda: relay._condition is not before)

    yield *(outer for outer, _ in pairs), condition
    os.close(sender)
    thread.join(10)
    assert not thread.is_alive(), "the relay ends with its commands"
    os.close(commands)
    for each in (each for pair in pairs for each in pair):
        each.close()


def num_unread_bytes(sender):
    return int.from_bytes(fcntl.ioctl(sender, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def received(sender, receiver, condition):
    """Send packets; return the numbers of those that arrive.

    The relay takes its commands when it has sent what it has read.
    """
    for number in range(NUM_PACKETS):
        sender.send(str(number).encode())
    wait_until(lambda: not num_unread_bytes(sender))
    condition()
    arrived = []
    receiver.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            arrived.append(int(receiver.recv(100)))
    return arrived


def test_every_packet_arrives_in_order_in_both_directions(ends):
    first, second, condition = ends
    for sender, receiver in ((first, second), (second, first)):
        assert received(sender, receiver, condition) == [*range(NUM_PACKETS)]


def test_a_share_is_lost_by_the_seed(ends):
    """200 packets with a loss of 0.3: 5 standard deviations are 32 packets."""
    first, second, condition = ends
    condition(loss=0.3, seed=7)
    once = received(first, second, condition)
    assert 140 - 32 < len(once) < 140 + 32
    condition(loss=0.0)
    condition(loss=0.3, seed=7)
    assert received(first, second, condition) == once


def test_a_partition_loses_all_until_it_ends(ends):
    first, second, condition = ends
    condition(loss=1.0)
    for sender, receiver in ((first, second), (second, first)):
        assert received(sender, receiver, condition) == []
    condition(loss=0.0)
    assert len(received(first, second, condition)) == NUM_PACKETS


def test_a_delay_is_for_each_packet(ends):
    first, second, condition = ends
    condition(delay_s=0.3)
    began_s = time.monotonic()
    for number in range(5):
        first.send(str(number).encode())
    assert [int(second.recv(100)) for _ in range(5)] == [*range(5)]
    assert time.monotonic() - began_s >= 0.3
