"""Makes the target again when it is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cluster.workers.backoff import Backoff
from cluster.workers.profile_messages import ShardOrder
from cluster.workers.target_group import TargetGroup
from specdec.types.errors import TargetFailedError
from specdec.types.profile import WorkerProfile

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""So many in a row, none followed by a minute of running, are a crash loop."""


class TargetSupervisor:
    """Holds the target in use. Whatever happened to one rank, the whole group is replaced."""

    def __init__(self, start: Callable[[], TargetGroup]) -> None:
        """`start` makes a warm target, or raises. The first one is started here."""
        self._start = start
        self._backoff = Backoff(time.monotonic)
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of `current`, against closing while one is made
        self.num_restarts = 0  # times that another target took the place of a lost one
        self.current = start()
        self._profiled: TargetGroup | None = None
        self._is_lost = False  # set on the engine's thread; until another takes its place
        self._backoff.started()

    def lose(self) -> None:
        """Has no profile touch the target any more; on the engine's thread, before `remake`.

        Sockets are for one thread at a time, and `remake` closes those of the lost target.
        """
        self._is_lost = True
        self._profiled = None

    def remake(self) -> TargetGroup:
        """Kills the target and starts another; raises TargetFailedError in a crash loop."""
        self.current.kill()
        while not self._closing.wait(self._delay_s()):
            try:
                target = self._start()
            except Exception as error:
                logger.warning("the target did not start: %s", error)
                continue
            return self._adopt(target)
        raise TargetFailedError("the service is shutting down")

    @property
    def num_ranks(self) -> int:
        """How many the target has; 0 from its loss until another takes its place."""
        return 0 if self._is_lost else self.current.num_ranks

    def begin_profile(self, order: ShardOrder) -> None:
        """See ProfiledModel."""
        self._profiled = None if self._is_lost else self.current
        if self._profiled is not None:
            self._profiled.begin_profile(order)

    def end_profile(self) -> None:
        """See ProfiledModel."""
        if self._profiled is not None:
            self._profiled.end_profile()

    def collect_profile(self) -> tuple[WorkerProfile, ...] | None:
        """See ProfiledModel."""
        return () if self._profiled is None else self._profiled.collect_profile()

    def close(self) -> None:
        """Ends the target, and keeps another from taking its place."""
        self._closing.set()
        with self._lock:
            self.current.close()

    def _delay_s(self) -> float:
        delay_s = self._backoff.delay_s()
        if self._backoff.num_failures > MAX_FAILURES:
            raise TargetFailedError(f"it failed {MAX_FAILURES} times in a row")
        return delay_s

    def _adopt(self, target: TargetGroup) -> TargetGroup:
        with self._lock:
            if self._closing.is_set():
                target.kill()
                raise TargetFailedError("the service is shutting down")
            self.current = target
            self._is_lost = False
        self.num_restarts += 1
        self._backoff.started()
        return target
