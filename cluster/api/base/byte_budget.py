"""Limit on the bytes of requests that a process holds at the same time."""

from __future__ import annotations

from contextlib import AbstractContextManager

from cluster.api.base.counters import Counter, OwnCounter
from specdec.types.errors import OverloadedError

SMALL_BYTES = 64 * 1024
"""Requests up to this size are not counted by default: many clients must not wait for the large
ones of few. Their number is limited elsewhere."""


class ByteBudget:
    """Budget of bytes for all calls of a process, or of several. For one event loop."""

    def __init__(
        self,
        max_bytes: float,
        counter: Counter | None = None,
        *,
        uncounted_bytes: int = SMALL_BYTES,
    ) -> None:
        """counter: of all bytes that are held; None for those of this process.

        uncounted_bytes: size up to which a request is not counted.
        """
        self.uncounted_bytes = uncounted_bytes
        self._max_bytes = max_bytes
        self._counter: Counter = counter or OwnCounter()

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return self._counter.total

    def hold(self, num_bytes: int = 0) -> HeldBytes:
        """Take bytes for a call, to be released at its end. Raises OverloadedError."""
        held = HeldBytes(self)
        held.grow_to(num_bytes)
        return held

    def take(self, num_bytes: int, num_held: int = 0) -> None:
        """Take bytes, or raise OverloadedError. Without other requests any size is accepted.

        num_held: bytes that the same request holds already.
        """
        has_others = self.num_bytes > num_held
        if has_others and self.num_bytes + num_bytes > self._max_bytes:
            limit = f"{self._max_bytes // 2**20} MiB, max_inflight_mib"
            raise OverloadedError(
                f"the requests in progress are too large together (limit {limit})"
            )
        self._counter.add(num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were taken."""
        self._counter.add(-num_bytes)


class HeldBytes(AbstractContextManager["HeldBytes"]):
    """The bytes of one request; a context manager that releases them."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Take what a request has grown by. Raises OverloadedError."""
        if num_bytes > self._budget.uncounted_bytes:
            self._budget.take(num_bytes - self._num_bytes, self._num_bytes)
            self._num_bytes = num_bytes

    def __exit__(self, *error: object) -> None:
        self._budget.give_back(self._num_bytes)
        self._num_bytes = 0
