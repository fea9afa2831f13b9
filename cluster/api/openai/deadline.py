"""Deadline of a request, measured from its arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.api.openai.errors import ApiError


@dataclass(frozen=True)
class Deadline:
    """Time limit of a request. timeout_s: the whole limit. at_s: its end, by `time.monotonic`."""

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Return the deadline `timeout_s` seconds from now."""
        return cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def remaining_s(self) -> float:
        """Seconds from now; 0 after the deadline."""
        return max(0.0, self.at_s - time.monotonic())

    @asynccontextmanager
    async def enforce(self) -> AsyncGenerator[None, None]:
        """Cancel the body of the `async with` at the deadline and raise ApiError 504."""
        scope = asyncio.timeout(self.remaining_s)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            message = f"the answer was not complete within {self.timeout_s:g} s"
            raise ApiError(504, message, "deadline_exceeded") from error
