"""Bodies are read as they were sent, up to their bound."""

import httpx
import pytest

from cluster.api.endpoint_picker.http_bodies import read_body

BODY = b"0123456789" * 10


async def read(max_bytes, *, status=200):
    """Read BODY, sent in ten pieces, from a server that answers with `status`."""

    async def pieces():
        for start in range(0, len(BODY), 10):
            yield BODY[start : start + 10]

    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=pieces()))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://replica") as client,
        client.stream("GET", "/metrics") as response,
    ):
        return await read_body(response, max_bytes)


async def test_a_body_of_its_bound_is_read():
    assert await read(len(BODY)) == BODY


async def test_a_larger_body_is_refused_with_its_path_and_its_bound():
    with pytest.raises(ValueError, match="/metrics has more than 99 bytes"):
        await read(len(BODY) - 1)


async def test_a_status_of_an_error_is_an_error():
    with pytest.raises(httpx.HTTPError):
        await read(len(BODY), status=503)
