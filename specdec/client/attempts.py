"""Attempts of a call: their deadline, their number, and the pauses between them."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from grpc import StatusCode

from specdec.client.errors import ClientError

logger = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.2, 0.4, 0.8)
"""Mean pause before each further attempt of a call that has received nothing."""

_LONGEST_S = 1e9
"""A longer timeout is no limit: clocks of the system and gRPC's cannot show its end."""

GRACE_S = 0.5
"""Time after a deadline in which gRPC reports it; then the client ends the call without gRPC."""


class Attempts:
    """Attempts of a call, and the time that they share.

    timeout_s: of all attempts together; None: no limit.
    """

    _codes: AbstractSet[StatusCode] = frozenset({StatusCode.UNAVAILABLE})
    _log_level = logging.INFO

    def __init__(
        self,
        timeout_s: float | None,
        delays_s: Sequence[float],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """delays_s: mean pause before each further attempt."""
        self.timeout_s = timeout_s = None if (timeout_s or 0) > _LONGEST_S else timeout_s
        self._delays_s = iter(delays_s)
        self._now_s = now_s
        self._ends_at_s = None if timeout_s is None else now_s() + timeout_s
        self._last_error: ClientError | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds that the next attempt may take; None: no limit."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - self._now_s())

    @property
    def wait_s(self) -> float | None:
        """Seconds to wait for gRPC; longer than `left_s`, so that gRPC reports the deadline."""
        left_s = self.left_s
        return None if left_s is None else left_s + GRACE_S

    def delay_s(self, error: ClientError) -> float:
        """Return the seconds to wait before the next attempt, and log it.

        Raises an error if there is none: the attempts are over, or the pause would outlast the
        deadline.
        """
        if error.code is StatusCode.DEADLINE_EXCEEDED and self._last_error is not None:
            message = f"{error}; the last attempt before failed: {self._last_error}"
            raise ClientError(error.code, message) from error
        mean_s = next(self._delays_s, None) if error.code in self._codes else None
        if mean_s is None:
            raise error
        delay_s, left_s = random.uniform(0.8, 1.2) * mean_s, self.left_s
        if left_s is not None and delay_s >= left_s:
            raise error
        self._last_error = error
        logger.log(self._log_level, "%s; trying again in %.1f s", error, delay_s)
        return delay_s
