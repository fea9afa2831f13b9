import asyncio

import pytest

from cluster.api.base.keep_alive import KeepAlive

pytestmark = pytest.mark.asyncio

START = {"type": "http.response.start", "status": 200}
EVENT = {"type": "http.response.body", "body": b"event", "more_body": True}
COMMENT = {"type": "http.response.body", "body": b":", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


class Connection:
    """Messages that were sent; `gate` holds the next ones back."""

    def __init__(self):
        self.sent, self.gate = [], asyncio.Event()
        self.gate.set()

    async def send(self, message):
        await self.gate.wait()
        self.sent.append(message)


async def test_each_silence_between_messages_has_comments():
    connection = Connection()
    sender = KeepAlive(connection.send, b":", 0.05)
    async with sender:
        await asyncio.sleep(0.15)
        assert connection.sent == []
        for message in (START, EVENT, EVENT):
            await sender.send(message)
            while connection.sent[-1:] != [COMMENT]:
                await asyncio.sleep(0.01)
        await sender.send(END)
        await asyncio.sleep(0.15)
    assert connection.sent[-1] == END
    shown = [each for each in connection.sent if each != COMMENT]
    assert shown == [START, EVENT, EVENT, END]


async def test_a_stream_that_sends_has_no_comments():
    connection = Connection()
    sender = KeepAlive(connection.send, b":", 5.0)
    async with sender:
        for _ in range(3):
            await sender.send(EVENT)
    assert connection.sent == [EVENT] * 3


@pytest.mark.parametrize("message", [EVENT, END])
async def test_a_message_that_begins_before_a_due_comment_replaces_it(message):
    connection = Connection()
    sender = KeepAlive(connection.send, b":", 5.0, now_s=iter(range(0, 1000, 6)).__next__)
    async with sender:
        await sender.send(START)
        connection.gate.clear()
        sending = asyncio.create_task(sender.send(message))  # runs before the comment's task
        sender._check()
        await asyncio.sleep(0.01)
        connection.gate.set()
        await sending
        await asyncio.sleep(0.01)
    assert connection.sent == [START, message]


async def test_a_client_that_does_not_read_gets_no_comments():
    connection = Connection()
    sender = KeepAlive(connection.send, b":", 0.02)
    async with sender:
        connection.gate.clear()
        sending = asyncio.create_task(sender.send(END))
        await asyncio.sleep(0.1)
        connection.gate.set()
        await sending
    assert connection.sent == [END]
