"""A draft supervisor that moves among shared workers while it drafts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import ray

from cluster.workers.group_spec import GroupSpec
from cluster.workers.groups.roles import DRAFT
from cluster.workers.groups.step_deadline import StepDeadline
from cluster.workers.groups.supervisors import DraftSupervisor
from cluster.workers.groups.worker_group import WorkerGroup
from cluster.workers.shared_draft.draft_seats import Seat, SeatRanks, SeatRequest
from cluster.workers.shared_draft.drafter_choice import Drafter, MovePolicy, by_expected_cost
from cluster.workers.shared_draft.pool_seats import PoolSeats
from cluster.workers.transport.transport import CurveKeys
from specdec.config.engine import DraftLimits
from specdec.speculation.proposers import DraftRequest, DraftVocabulary, Proposal
from specdec.types.draft_messages import DraftOutput, DraftStep
from specdec.types.errors import DraftFailedError

logger = logging.getLogger(__name__)

_LOOK_PERIOD_S = 1.0

_LATE_S = 0.5
"""Age of an unanswered step above which a Router leaves for any other worker, at once."""

_NUM_UNSEEN = 2
"""Looks in a row without a report of its worker after which a Router leaves it: Serve stops it."""


class PoolSupervisor(DraftSupervisor):
    """A DraftSupervisor whose groups are seats at shared draft workers.

    A thread looks at the workers each second, and opens a seat at a better one; the engine's thread
    then leaves the old seat, between two steps.
    """

    def __init__(
        self,
        seats: PoolSeats,
        spec: GroupSpec,
        vocabulary: DraftVocabulary,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the first seat. Raises DraftFailedError. spec: with the blocks that it uses."""
        assert isinstance(spec.limits, DraftLimits), "the spec of a target"
        self._seats = seats
        self._spec = spec
        self._num_blocks = spec.limits.num_blocks
        self._patience: StepDeadline | None = None  # by the drafts at all seats
        self._policy = MovePolicy(clock)
        self._num_unseen = 0  # looks in a row
        self._others: list[Drafter] = []  # at the last look, the best first
        self._next: WorkerGroup[DraftStep, DraftOutput] | None = None  # under the lock
        super().__init__(self._take_seat, spec.limits, vocabulary, clock=clock)
        threading.Thread(target=self._watch, name="draft-pool", daemon=True).start()

    def take(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """See DraftSupervisor."""
        self._move()
        return super().take(requests)

    def check(self) -> None:
        """See DraftSupervisor."""
        self._move()
        super().check()

    def close(self) -> None:
        """See Supervisor."""
        super().close()
        with self._lock:
            if self._next is not None:
                self._next.kill()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_PERIOD_S):
            try:
                self.look()
            except Exception as error:
                logger.warning("no seat at a better draft worker: %s", error)

    def look(self) -> None:
        """Open a seat at a better worker, if there is one."""
        group = self._group
        if group is None or self._next is not None:
            return
        assert isinstance(group.ranks, SeatRanks), "a group without a seat"
        if group.late_s > _LATE_S and self._leave(group):  # its report would be late, too
            return
        drafters, use = self._seats.look(group.ranks.seat)
        by_name = {each.name: each for each in drafters}
        own = by_name.pop(group.ranks.seat.drafter, None)
        step_s = 0.0 if use is None else use.step_s
        self._num_unseen = 0 if own is not None else self._num_unseen + 1
        self._others = by_expected_cost(by_name.values(), step_s)
        if group.late_s > _LATE_S or self._num_unseen >= _NUM_UNSEEN:
            self._leave(group)
        elif own is not None and step_s:
            better = self._policy.better(own, by_name.values(), step_s)
            if better is not None:
                self._open(better, group, is_move=True)

    def _leave(self, group: WorkerGroup[DraftStep, DraftOutput]) -> bool:
        """Open a seat at any other worker of the last look; return whether there is one."""
        assert isinstance(group.ranks, SeatRanks), "a group without a seat"
        left = group.ranks.seat.drafter  # after a move or a restart the last look has this one
        others = [each for each in self._others if each.name != left]
        return any(self._open(each, group, is_move=False) for each in others)

    def _open(
        self, drafter: Drafter, left: WorkerGroup[DraftStep, DraftOutput], *, is_move: bool
    ) -> bool:
        """Open a seat in place of `left` for the engine's thread; return whether there is one."""
        group = self._seated_at(drafter, is_move=is_move)
        if group is None:
            return False
        self._policy.record_seat()
        with self._lock:
            if self._closing.is_set() or self._group is not left:  # a restart has another seat
                group.kill()
            else:
                self._next = group
        return True

    def _take_seat(self) -> WorkerGroup[DraftStep, DraftOutput]:
        known, self._others = self._others, []  # tried once: others may take these seats meanwhile
        for each in known:
            if (group := self._seated_at(each)) is not None:
                return group
        keys = CurveKeys.generate()
        return self._connect(
            self._seats.take(self._request(keys), self._spec.start_timeout_s), keys
        )

    def _seated_at(
        self, drafter: Drafter, *, is_move: bool = False
    ) -> WorkerGroup[DraftStep, DraftOutput] | None:
        """Return a group with a seat at one worker, or None if it gives none."""
        keys = CurveKeys.generate()
        seat = self._seats.take_at(drafter, self._request(keys, is_move=is_move))
        if seat is None:
            return None
        try:
            return self._connect(seat, keys)
        except (DraftFailedError, OSError) as error:
            logger.warning("no seat at draft worker %s: %s", drafter.name, error)
            return None

    def _connect(self, seat: Seat, keys: CurveKeys) -> WorkerGroup[DraftStep, DraftOutput]:
        step_timeout_s = self._spec.step_timeout_s
        spec = replace(self._spec, start_timeout_s=step_timeout_s)  # the worker is warm
        ranks = SeatRanks(seat, keys, step_timeout_s)
        group = WorkerGroup(DRAFT, spec, None, ranks)
        self._patience = group.patience = self._patience or group.patience
        return group

    def _request(self, keys: CurveKeys, *, is_move: bool = False) -> SeatRequest:
        address = str(ray.util.get_node_ip_address())
        return SeatRequest(address, keys.public, self._num_blocks, is_move)

    def _move(self) -> None:
        """Leave the present seat for the next one, if that is open."""
        with self._lock:
            group, self._next, left = self._next, None, self._group
            if group is None:
                return
            if left is not None:
                self._group, self._others = group, []
        if left is None:  # lost meanwhile: a restart takes another seat
            group.kill()
            return
        self._profiled = None
        self._leave_proposer()
        left.close()
        self.num_moves += 1
