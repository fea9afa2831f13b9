"""Messages over a socket pair, from the event loop and from other threads."""

import asyncio
import socket
import threading

import pytest

from cluster.api.base.authentication import ApiKey
from cluster.api.front_ends.channel import Channel
from cluster.api.front_ends.messages import Start


class Unreadable:
    """Is pickled, but cannot be read."""

    def __reduce__(self):
        return int, ("no number",)


@pytest.fixture
async def ends():
    """Two connected ends; each has a list of what came, and of its losses."""
    made = []
    for each in socket.socketpair():
        came, lost = asyncio.Queue(), asyncio.Event()
        made.append((Channel(each, came.put_nowait, lost.set), came, lost))
    yield made
    for channel, _, _ in made:
        channel.close()


async def test_messages_come_in_their_order(ends):
    (one, _, _), (_, came, _) = ends
    for number in range(100):
        one.send("number", number, b"x" * (number % 7))
    assert [await came.get() for _ in range(100)] == [
        ("number", number, b"x" * (number % 7)) for number in range(100)
    ]


async def test_the_text_of_the_first_message_has_no_credential():
    key = ApiKey("ann", "key-secret")
    assert "secret" not in repr(Start(None, "1.", (key,), "token-secret"))


async def test_sending_waits_for_no_reader(ends):
    """More than a socket holds: the rest is sent once there is room."""
    (one, _, _), (other, came, _) = ends
    sent = [("large", bytes([number]) * 700_000) for number in range(9)]
    for each in sent:
        one.send(*each)
    other.send("small")
    assert [await came.get() for _ in sent] == sent


async def test_threads_send_whole_messages(ends):
    (one, _, _), (_, came, _) = ends

    def send(name):
        for number in range(200):
            one.send(name, number, b"x" * 3000)

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for each in threads:
        each.start()
    found = [await came.get() for _ in range(600)]
    for each in threads:
        each.join()
    for name in "abc":
        assert [number for who, number, _ in found if who == name] == [*range(200)]


@pytest.mark.parametrize("message", [lambda: None, Unreadable()])
async def test_a_message_that_cannot_pass_is_a_loss(ends, message):
    (one, _, one_lost), (_, came, other_lost) = ends
    one.send("before")
    one.send("bad", message)
    await asyncio.wait(
        [asyncio.create_task(each.wait()) for each in (one_lost, other_lost)],
        return_when=asyncio.FIRST_COMPLETED,
    )
    assert came.get_nowait() == ("before",)


async def test_the_loss_of_the_other_end_is_reported_after_its_messages(ends):
    (one, _, one_lost), (other, came, other_lost) = ends
    one.send("last")
    one.close()
    assert await came.get() == ("last",)
    await other_lost.wait()
    other.send("dropped")
    assert not one_lost.is_set()
