"""The time limit of a request."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

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

    def enforce(self) -> EnforcedDeadline:
        """Cancel the body of an `async with` at the deadline and raise `error`."""
        return EnforcedDeadline(self)


class EnforcedDeadline:
    """Asynchronous context manager that ends its body at a deadline, with the deadline's error."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._scope = asyncio.timeout(deadline.remaining_s)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(self, *failure: Any) -> None:
        try:
            await self._scope.__aexit__(*failure)
        except TimeoutError as error:
            raise self._deadline.error from error
