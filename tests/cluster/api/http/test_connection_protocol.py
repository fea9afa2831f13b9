# Modules: cluster.api.http.connection
"""What connections accept as requests: other versions and protocols, and bytes that are no HTTP."""

import pytest

from tests.cluster.http_server import connected, running_server


@pytest.mark.parametrize("size", [None, b"%d" % len(b"hello")])
async def test_a_response_to_http_1_0_has_no_chunks(size):
    async def app(scope, receive, send):
        headers = [] if size is None else [(b"content-length", size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"he", "more_body": True})
        await send({"type": "http.response.body", "body": b"llo", "more_body": False})

    async with running_server(app) as port, connected(port) as client:
        await client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        head, _, body = (await client.answer()).partition(b"\r\n\r\n")
    assert body == b"hello"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
