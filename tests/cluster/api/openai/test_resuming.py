"""The helper of docs/clients.md that resumes streams of OpenAI's client, as it is shown there.

It runs against the HTTP interface on a real server, whose streams break in each way that it knows.
"""

import asyncio
import json
from pathlib import Path

import pytest

from cluster.api.base.authentication import ApiKeys
from cluster.api.base.openai_errors import ApiError, failure_of
from cluster.api.base.sse import event
from cluster.api.http_app import make_app
from tests.cluster.api.openai.conftest import alone
from tests.cluster.http_server import running_server
from tests.shell_blocks import blocks_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = Path(__file__).parents[4] / "docs" / "clients.md"
LOST = failure_of(ApiError(503, "the replica was lost", "service_unavailable"))
NUM_MESSAGES = 3


class BrokenStreams:
    """ASGI middleware that breaks the first requests, each in its own way, and records them."""

    def __init__(self, app):
        self._app = app
        self._faults = [self._cut, self._refuse, self._end_with_an_error]
        self.bodies = []

    async def __call__(self, scope, receive, send):
        message = await receive()
        assert not message["more_body"], "a small body arrives whole"
        self.bodies.append(json.loads(message["body"]))

        async def receive_again():
            nonlocal message
            first, message = message, None
            return await receive() if first is None else first

        fault = self._faults.pop(0) if self._faults else self._app
        await fault(scope, receive_again, send)

    async def _refuse(self, scope, receive, send):
        await LOST.respond()(scope, receive, send)

    async def _cut(self, scope, receive, send):
        """Close the connection after some messages."""
        await self._app(scope, receive, _first_messages(send))

    async def _end_with_an_error(self, scope, receive, send):
        with pytest.raises(ConnectionResetError):
            await self._app(scope, receive, _first_messages(send))
        await send({"type": "http.response.body", "body": event(LOST.body.model_dump_json())})


def _first_messages(send):
    num_sent = 0

    async def send_first(message):
        nonlocal num_sent
        if num_sent > NUM_MESSAGES:  # the head is not counted
            raise ConnectionResetError
        num_sent += 1
        await send(message)

    return send_first


def shown_helper(port):
    """Return the block that defines the helper and calls it, for the server of this test."""
    [text] = [each.text for each in blocks_of(PAGE, "python") if "def resumed(" in each.text]
    for shown, here in (("127.0.0.1:8000", f"127.0.0.1:{port}"), ("smollm2-135m-instruct", "tiny")):
        assert shown in text
        text = text.replace(shown, here)
    return text


async def test_the_shown_helper_resumes_broken_streams(router, http, unjoined, monkeypatch, capsys):
    monkeypatch.setattr(router, "new_seed", lambda: 5)
    app = BrokenStreams(make_app(lambda: router, lambda: alone(router), ApiKeys))
    async with running_server(app) as port:
        await asyncio.to_thread(exec, shown_helper(port), {})
    received = [len(each["resume_token_ids"]) for each in app.bodies]
    assert len(received) == 4, "two streams broke and one was refused"
    assert received[0] == 0 < received[1] == received[2] < received[3]
    whole = {**app.bodies[0], "stream": False, "seed": 5}
    response = await http.post("/v1/completions", json=whole)
    assert capsys.readouterr().out == response.json()["choices"][0]["text"]
