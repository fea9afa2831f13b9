"""Bodies of HTTP responses, whose size has a bound: no server is trusted to send small ones."""

from __future__ import annotations

import httpx


async def read_body(response: httpx.Response, max_bytes: int) -> bytes:
    """Read the body of a streamed response, as it was sent.

    Raises HTTPError, also for a status that reports an error, and ValueError for a larger body.
    """
    response.raise_for_status()
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise ValueError(f"the body of {response.url.path} has more than {max_bytes} bytes")
    return bytes(body)
