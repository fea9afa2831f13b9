"""When an answer has to be complete: from the moment that its request came in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.api.openai.errors import ApiError


@dataclass(frozen=True)
class Deadline:
    """timeout_s: seconds that there were in all. at_s: when they end, by `time.monotonic`."""

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """So many seconds from now."""
        return cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds from now, 0 when the time is up."""
        return max(0.0, self.at_s - time.monotonic())

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None, None]:
        """Cancels what runs within when the time is up. Raises ApiError 504 then."""
        scope = asyncio.timeout(self.left_s)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            message = f"the answer was not complete within {self.timeout_s:g} s"
            raise ApiError(504, message, "deadline_exceeded") from error
