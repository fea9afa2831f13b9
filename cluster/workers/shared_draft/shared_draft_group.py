"""A draft worker that several Routers share, restarted when it is lost, with the seats that it has.

Its Routers notice the loss by their sockets, and take a seat again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.workers.group_spec import GroupSpec
from cluster.workers.groups.backoff import Backoff
from cluster.workers.groups.ranks import RANK_ENVIRONMENT, exit_reason
from cluster.workers.ray.resources import CPUS_PER_WORKER
from cluster.workers.shared_draft.draft_seats import Seat, SeatRequest
from cluster.workers.shared_draft.shared_draft_worker import SharedDraftWorker
from specdec.types.errors import DraftFailedError

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_ANSWER_TIMEOUT_S = 10.0

_NUM_THREADS = 3
"""Threads of the actor: one that computes, one that admits Routers, one that counts them."""


class RunningWorker(Protocol):
    """A worker that is warm; see SharedDraftWorker."""

    def admit(self, request: SeatRequest) -> Seat | None:
        """Return a seat, or None while all are taken."""

    def num_taken(self) -> int:
        """Return the number of seats that are taken."""

    def loss(self) -> str | None:
        """Return why it has ended; None while it runs."""

    def kill(self) -> None:
        """End it."""


class SharedDraftGroup:
    """Keeps one worker running, from the thread of `run` on; the other methods are for any thread.

    While there is none, no seat is free.
    """

    def __init__(
        self, start: Callable[[], RunningWorker], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """start: returns a warm worker, or raises."""
        self._start = start
        self._backoff = Backoff(clock)
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of the next one
        self._worker: RunningWorker | None = None
        self.num_restarts = 0

    def start(self) -> None:
        """Start the first worker, or raise what that raises; then watch it in the background."""
        self._worker = self._start()
        self._backoff.started()
        threading.Thread(target=self._watch, name="draft-host", daemon=True).start()

    def admit(self, request: SeatRequest) -> Seat | None:
        """Return a seat; None while all are taken, or there is no worker."""
        worker = self._worker
        if worker is None:
            return None
        try:
            return worker.admit(request)
        except Exception as error:
            logger.warning("the draft worker admits no Router: %s", error)
            return None

    def num_taken(self) -> int | None:
        """Return the number of seats that are taken; None while there is no worker."""
        worker = self._worker
        try:
            return None if worker is None else worker.num_taken()
        except Exception:  # it has ended, which `_watch` reports
            return None

    def close(self) -> None:
        """End the worker, and start none from now on."""
        self._closing.set()
        with self._lock:
            if self._worker is not None:
                self._worker.kill()
                self._worker = None

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            worker = self._worker
            if worker is None:
                self._restart()
            elif (reason := worker.loss()) is not None:
                logger.warning("the shared draft worker %s", reason)
                worker.kill()
                self._worker = None

    def _restart(self) -> None:
        if self._closing.wait(self._backoff.delay_s()):
            return
        try:
            worker = self._start()
        except Exception as error:
            logger.warning("the shared draft worker did not start: %s", error)
            return
        with self._lock:
            if self._closing.is_set():
                worker.kill()
                return
            self.num_restarts += 1
            self._backoff.started()
            self._worker = worker


class ActorWorker:
    """A SharedDraftWorker in its actor. actor: its handle."""

    def __init__(self, actor: Any, run: Any) -> None:
        """run: reference of the result of its `run`."""
        self._actor = actor
        self.reference = run

    def admit(self, request: SeatRequest) -> Seat | None:
        """See RunningWorker."""
        seat: Seat | None = ray.get(self._actor.admit.remote(request), timeout=_ANSWER_TIMEOUT_S)
        return seat

    def num_taken(self) -> int:
        """See RunningWorker."""
        return int(ray.get(self._actor.num_taken.remote(), timeout=_ANSWER_TIMEOUT_S))

    def loss(self) -> str | None:
        """See RunningWorker."""
        ended, _ = ray.wait([self.reference], timeout=0)
        return f"ended{exit_reason(self.reference)}" if ended else None

    def kill(self) -> None:
        """See RunningWorker."""
        ray.kill(self._actor)


def start_worker(spec: GroupSpec, num_seats: int, placement: PlacementGroup) -> ActorWorker:
    """Start a worker in the spec's bundle of a placement group, and wait until it is warm.

    Leaves no process if it raises: DraftFailedError, or what Ray raises.
    """
    strategy = PlacementGroupSchedulingStrategy(placement, spec.bundle_index)
    options = ray.remote(SharedDraftWorker).options(
        num_cpus=CPUS_PER_WORKER,
        num_gpus=0 if spec.device == "cpu" else spec.gpus_per_rank,
        max_restarts=0,
        max_concurrency=_NUM_THREADS,
        runtime_env={"env_vars": RANK_ENVIRONMENT},
        scheduling_strategy=strategy,
    )
    actor = options.remote(spec, num_seats)
    worker = ActorWorker(actor, actor.run.remote())
    try:
        warm = actor.wait_until_warm.remote(spec.start_timeout_s)
        ended, _ = ray.wait([warm, worker.reference], timeout=spec.start_timeout_s)
        if ended == [worker.reference] or not ended:
            reason = worker.loss() or f"was not warm within {spec.start_timeout_s:g} s"
            raise DraftFailedError(f"the shared draft worker {reason}")
        ray.get(warm)
    except BaseException:
        worker.kill()
        raise
    return worker
