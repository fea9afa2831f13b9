"""Keeps a draft model's worker alive: requests go on without it, and with it again later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from cluster.workers.backoff import Backoff
from cluster.workers.draft_group import DraftGroup
from cluster.workers.profile_messages import ShardOrder
from specdec.config.engine import DraftLimits
from specdec.speculation.proposers import (
    DraftModelProposer,
    DraftRequest,
    DraftVocabulary,
    Proposal,
)
from specdec.types.errors import DraftFailedError
from specdec.types.profile import WorkerProfile
from specdec.types.worker import DraftWorker

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DraftSupervisor:
    """A proposer that drafts while its worker lives, and otherwise proposes nothing.

    A lost worker is killed and started anew on a thread of its own, with backoff and for ever: a
    service without drafts is slower, not broken. A new worker knows nothing; its proposer catches
    up on the sequences that run.
    """

    def __init__(
        self,
        start: Callable[[], DraftGroup],
        limits: DraftLimits,
        vocabulary: DraftVocabulary,
    ) -> None:
        """`start` makes a warm worker, or raises. The first one is started here."""
        self._start = start
        self._limits = limits
        self._vocabulary = vocabulary
        self._backoff = Backoff(time.monotonic)
        self._worker: DraftGroup | None = start()
        self._proposer: DraftModelProposer | None = self._new_proposer(self._worker)
        self._profiled: DraftGroup | None = None
        self._lock = threading.Lock()  # of what the thread that restarts leaves for the engine's
        self._successor: DraftGroup | None = None
        self._closing = threading.Event()
        self.num_restarts = 0  # times that another worker was ready after one was lost
        self.num_catch_up_tokens = 0  # by all workers; see DraftModelProposer
        self._backoff.started()

    @property
    def is_available(self) -> bool:
        """Whether a worker is there to draft."""
        return self._worker is not None or self._successor is not None

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Starts drafting, if there is a worker."""
        self._adopt()
        if self._proposer is not None:
            num_before = self._proposer.num_catch_up_tokens
            try:
                self._proposer.begin(requests)
                self.num_catch_up_tokens += self._proposer.num_catch_up_tokens - num_before
            except Exception as error:
                self._lose(error)

    def collect(self) -> list[Proposal]:
        """The drafts; none when the worker is away or was lost meanwhile."""
        if self._proposer is None:
            return []
        try:
            return self._proposer.collect()
        except Exception as error:
            self._lose(error)
            return []

    def release(self, seq_id: int) -> None:
        """Forgets a sequence."""
        if self._proposer is not None:
            self._proposer.release(seq_id)

    def check(self) -> None:
        """Notices a worker that died while nobody drafted; to be called on the engine's thread."""
        if self._worker is not None:
            try:
                self._worker.check_alive()
            except DraftFailedError as error:
                self._lose(error)

    def measure(self, measure: Callable[[DraftWorker], Result]) -> Result | None:
        """What `measure` finds out about the worker, before it is told of any sequence.

        None where it is lost meanwhile.
        """
        if self._worker is None:
            return None
        try:
            return measure(self._worker)
        except Exception as error:
            self._lose(error)
            return None

    @property
    def num_ranks(self) -> int:
        """How many the worker has; 0 while it is away."""
        worker = self._worker
        return 0 if worker is None else worker.num_ranks

    def begin_profile(self, order: ShardOrder) -> None:
        """See ProfiledModel."""
        self._profiled = self._worker
        if self._profiled is not None:
            self._profiled.begin_profile(order)

    def end_profile(self) -> None:
        """See ProfiledModel."""
        if self._profiled is not None:
            self._profiled.end_profile()

    def collect_profile(self) -> tuple[WorkerProfile, ...] | None:
        """See ProfiledModel."""
        if self._profiled is None or self._profiled is not self._worker:
            return ()
        return self._profiled.collect_profile()

    def close(self) -> None:
        """Ends the worker, after the engine's last call."""
        self._closing.set()
        with self._lock:
            for worker in (self._worker, self._successor):
                if worker is not None:
                    worker.close()
            self._worker = self._proposer = self._successor = None

    def _new_proposer(self, worker: DraftGroup) -> DraftModelProposer:
        adapter = self._vocabulary.new_adapter()
        return DraftModelProposer(worker, self._limits, adapter)

    def _lose(self, error: Exception) -> None:
        """Whatever went wrong in drafting, no request is to notice."""
        is_known = isinstance(error, DraftFailedError)
        logger.warning("going on without drafts: %s", error, exc_info=None if is_known else error)
        assert self._worker is not None
        self._worker.kill()
        self._worker = self._proposer = None
        threading.Thread(target=self._restart, name="draft-restart", daemon=True).start()

    def _restart(self) -> None:
        while not self._closing.wait(self._backoff.delay_s()):
            try:
                worker = self._start()
            except Exception as error:
                logger.warning("the draft model did not start: %s", error)
                continue
            with self._lock:
                if self._closing.is_set():
                    worker.close()
                else:
                    self._successor = worker
                    self.num_restarts += 1
            return

    def _adopt(self) -> None:
        with self._lock:
            if self._successor is None:
                return
            self._worker, self._successor = self._successor, None
        self._proposer = self._new_proposer(self._worker)
        self._backoff.started()
        logger.warning("drafting again, with a new worker")
