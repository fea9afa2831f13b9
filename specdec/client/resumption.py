"""Goes on with a stream that broke, as if it had not.

With verifier `coupled` the output of a request is a function of its prompt, parameters and seed. So
another replica, or the same one made again, continues behind the tokens that have come, with the
tokens that would have come (in float32; differently shaped batches in bfloat16 may decide a tie
otherwise). With `rejection` and `block` they are others of the same distribution.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, closing

from grpc import StatusCode

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.errors import ClientError
from specdec.types.responses import StreamChunk

RESUME_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each further attempt: half a minute in all, as a replica may take to start."""

_Start = Callable[[pb.GenerateRequest], Generator[StreamChunk, None, None]]
_AsyncStart = Callable[[pb.GenerateRequest], AsyncGenerator[StreamChunk, None]]


_PASSING = (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)
"""A replica is lost, or the ones that are left are full for the moment."""


class TimeLeft:
    """The time of a call, which all its attempts share."""

    def __init__(self, timeout_s: float | None, now_s: Callable[[], float]) -> None:
        """timeout_s: from now on; None: no limit. now_s: a clock."""
        self._now_s = now_s
        self._ends_at_s = None if timeout_s is None else now_s() + timeout_s

    @property
    def timeout_s(self) -> float | None:
        """What the next attempt may take; None: no limit."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - self._now_s())

    def pause_s(self, delay_s: float) -> float:
        """A pause as long as there is time for it."""
        left_s = self.timeout_s
        return delay_s if left_s is None else min(delay_s, left_s)


def resumed(
    start: _Start, request: pb.GenerateRequest, sleep: Callable[[float], None] = time.sleep
) -> Generator[StreamChunk, None, None]:
    """Streams a request, which `start` sends, and where the stream breaks sends what is left of it.

    The request must have a single choice: those of several cannot be gone on with.
    Before anything has come there is nothing to go on with, and the error is the caller's. So it is
    after the last attempt. `request` is changed on the way.
    """
    remainder = _Remainder(request)
    while not remainder.is_empty:
        try:
            with closing(start(request)) as chunks:
                for chunk in chunks:
                    remainder.note(chunk)
                    yield chunk
                    if remainder.is_empty:
                        return  # whatever happens to the call now, the answer is whole
            return
        except ClientError as error:
            delay_s = remainder.delay_s(error)
        sleep(delay_s)


async def resumed_async(
    start: _AsyncStart,
    request: pb.GenerateRequest,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncGenerator[StreamChunk, None]:
    """The same for asyncio."""
    remainder = _Remainder(request)
    while not remainder.is_empty:
        try:
            async with aclosing(start(request)) as chunks:
                async for chunk in chunks:
                    remainder.note(chunk)
                    yield chunk
                    if remainder.is_empty:
                        return
            return
        except ClientError as error:
            delay_s = remainder.delay_s(error)
        await sleep(delay_s)


class _Remainder:
    """What is still to be asked for, and after which pause."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._delays_s = iter(RESUME_DELAYS_S)
        self._has_begun = False
        self.is_empty = False

    def note(self, chunk: StreamChunk) -> None:
        """Asks for what follows a chunk."""
        request, self._has_begun = self._request, True
        request.request_id = chunk.request_id
        request.resume_token_ids.extend(chunk.token_ids)
        request.sampling.ClearField("prompt_logprobs")  # they have come, with the first chunk
        if chunk.seed is not None:
            request.sampling.seed = chunk.seed
        self.is_empty = chunk.finish_reason is not None

    def delay_s(self, error: ClientError) -> float:
        """Seconds to wait. Raises the error where another attempt gains nothing."""
        delay_s = next(self._delays_s, None)
        if not self._has_begun or error.code not in _PASSING or delay_s is None:
            raise error
        return delay_s
