"""The time limit of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specdec.types.errors import DeadlineExceededError


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

    @property
    def error(self) -> DeadlineExceededError:
        """The error of a request that it ends."""
        return DeadlineExceededError(f"the answer was not complete within {self.timeout_s:g} s")

    @asynccontextmanager
    async def enforce(self) -> AsyncGenerator[None, None]:
        """Cancel the body of the `async with` at the deadline and raise `error`."""
        scope = asyncio.timeout(self.remaining_s)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise self.error from error
