"""Spare ranks: processes that have imported everything, and replace the ranks of a lost group.

Most of the time that a restart takes is the start of a process and the import of torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic

from cluster.workers.groups.backoff import Backoff
from cluster.workers.groups.ranks import OpenRanks, Ranks
from cluster.workers.groups.roles import OutputT, StepT
from cluster.workers.groups.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


class SpareRanks(Generic[StepT, OutputT]):
    """Starts the groups of one model, and keeps spare ranks for the next one.

    Spares belong to one group, whose node and GPUs they take over; those of an earlier group are
    not used. `start` is called by one thread at a time, the others from any thread.
    """

    def __init__(
        self,
        start_group: Callable[[Ranks | None], WorkerGroup[StepT, OutputT]],
        start_spare: Callable[[OpenRanks], Ranks],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store how to start both.

        start_group: returns a warm group, of new ranks for None. start_spare: returns open spares
        of the given ranks. clock: in seconds.
        """
        self._start_group = start_group
        self._start_spare = start_spare
        self._clock = clock
        self._backoff = Backoff(clock)
        self._lock = threading.Lock()  # of the fields below
        self._spare: Ranks | None = None
        self._starting: threading.Thread | None = None
        self._group: WorkerGroup[StepT, OutputT] | None = None  # that spares are started for
        self._not_before_s = 0.0
        self._is_closed = False

    def start(self) -> WorkerGroup[StepT, OutputT]:
        """Return a warm group: of the spares where these are prepared, otherwise of new ranks."""
        spare = self._take()
        if spare is not None:
            try:
                return self._start_group(spare)
            except Exception as error:
                logger.warning("spare ranks did not replace lost ones: %s", error)
        return self._start_group(None)

    def maintain(self, group: WorkerGroup[StepT, OutputT]) -> None:
        """Start spares of `group` in the background unless it has some that live. Does not wait."""
        with self._lock:
            self._group = group
            if self._is_closed or self._starting is not None:
                return
            if self._spare is not None:
                if self._spare.loss() is None:
                    return
                self._drop()
                self._record_failure("ended")
            if self._clock() < self._not_before_s:
                return
            self._starting = threading.Thread(
                target=self._start_in_background, args=(group,), name="spare-ranks", daemon=True
            )
            self._starting.start()

    def close(self) -> None:
        """End the spares, and start none from now on."""
        with self._lock:
            self._is_closed = True
            self._drop()

    def _take(self) -> Ranks | None:
        """Return the spares if they can be used now; end others."""
        with self._lock:
            self._group = None
            if self._spare is None:
                return None
            if not self._spare.poll_prepared() or self._spare.loss() is not None:
                self._drop()
            spare, self._spare = self._spare, None
            return spare

    def _start_in_background(self, group: WorkerGroup[StepT, OutputT]) -> None:
        spare, error = None, None
        try:
            spare = self._start_spare(group.ranks)
        except Exception as raised:
            error = raised
        with self._lock:
            self._starting = None
            if spare is None:
                self._record_failure(f"did not start: {error}")
            elif self._is_closed or self._group is not group:
                spare.kill()
            else:
                self._spare = spare
                self._backoff.started()

    def _drop(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()

    def _record_failure(self, reason: str) -> None:
        if not self._is_closed:
            logger.warning("the spare ranks %s", reason)
            self._not_before_s = self._clock() + self._backoff.delay_s()
