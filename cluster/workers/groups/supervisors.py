"""Worker groups that are restarted when a rank is lost, as a whole and with backoff.

Without its target, the engine pauses the streams and recomputes them on the next group. Without its
draft model, requests continue without speculation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from cluster.workers.group_spec import RankPlace
from cluster.workers.groups.backoff import Backoff
from cluster.workers.groups.roles import OutputT, StepT
from cluster.workers.groups.spare import SpareRanks
from cluster.workers.groups.worker_group import WorkerGroup
from cluster.workers.messages.profile_messages import WorkerProfileOrder
from specdec.config.engine import DraftLimits
from specdec.speculation.proposers import (
    DraftModelProposer,
    DraftRequest,
    DraftVocabulary,
    Proposal,
    SentRow,
)
from specdec.speculation.proposers.outcome_planner import OutcomePlanner
from specdec.types.adapters import AdapterFile
from specdec.types.draft_messages import DraftOutput, DraftStep
from specdec.types.errors import DraftFailedError, TargetFailedError
from specdec.types.messages import StepInput, VerifyOutput
from specdec.types.ranks import DraftWorker
from specdec.types.reports.profile import WorkerProfile
from specdec.types.reports.stats import Counts

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_FAILURES = 5
"""More consecutive failures of a target, none followed by a minute of running, are a crash loop."""


class Supervisor(Generic[StepT, OutputT]):
    """A worker group that is replaced by a new one when it is lost.

    Methods are called on the engine's thread, except for `restart` and `close`.
    """

    _model: ClassVar[str]

    def __init__(
        self,
        start: Callable[[], WorkerGroup[StepT, OutputT]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the first group.

        start: returns a warm group, or raises. clock: monotonic, in seconds.
        """
        self._start = start
        self._backoff = Backoff(clock)
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of `_group`, which `restart` sets while `close` may run
        self._group: WorkerGroup[StepT, OutputT] | None = start()
        self._profiled: WorkerGroup[StepT, OutputT] | None = None
        self.num_restarts = 0
        self._backoff.started()

    @property
    def is_available(self) -> bool:
        """Return whether there is a group: not from a loss until the restart."""
        return self._group is not None

    @property
    def num_ranks(self) -> int:
        """The number of ranks; 0 from a loss until the restart."""
        group = self._group
        return 0 if group is None else group.num_ranks

    @property
    def places(self) -> Sequence[RankPlace]:
        """Where the ranks run; none from a loss until the restart, nor of shared ranks."""
        group = self._group
        return () if group is None else group.ranks.places

    def mark_lost(self) -> None:
        """Kill the group and stop using it, also for profiles.

        On the engine's thread, which uses the group's sockets.
        """
        self._profiled = None
        with self._lock:
            lost, self._group = self._group, None
        if lost is not None:
            lost.kill()

    def restart(self) -> WorkerGroup[StepT, OutputT] | None:
        """Start another group, retrying with backoff; return None when the supervisor closes."""
        while not self._closing.wait(self._delay_s()):
            try:
                group = self._start()
            except Exception as error:
                logger.warning("the %s did not start: %s", self._model, error)
                continue
            with self._lock:
                if self._closing.is_set():
                    group.kill()
                    return None
                self.num_restarts += 1
                self._backoff.started()
                self._group = group
            return group
        return None

    def _delay_s(self) -> float:
        return self._backoff.delay_s()

    def begin_profile(self, order: WorkerProfileOrder) -> None:
        """Begin a profile on every rank, if there is a group. Does not wait."""
        self._profiled = self._group
        if self._profiled is not None:
            self._profiled.begin_profile(order)

    def end_profile(self) -> None:
        """End the profile on the ranks where it is still active. Does not wait."""
        if self._profiled is not None:
            self._profiled.end_profile()

    def collect_profile(self) -> tuple[WorkerProfile, ...] | None:
        """Return the reports of all ranks; none if the group was lost; None until they arrive.

        Does not wait, and may be called again.
        """
        return () if self._profiled is None else self._profiled.collect_profile()

    def close(self) -> None:
        """Stop the group and any restart, after the engine's last call."""
        self._closing.set()
        with self._lock:
            if self._group is not None:
                self._group.close()


class TargetSupervisor(Supervisor[StepInput, VerifyOutput]):
    """The target: the engine's recovery thread restarts it and waits; a crash loop ends that."""

    _model = "target"

    @property
    def current(self) -> WorkerGroup[StepInput, VerifyOutput]:
        """The group in use, which `restart` replaces."""
        assert self._group is not None, "the target is lost"
        return self._group

    def restart(self) -> WorkerGroup[StepInput, VerifyOutput]:
        """Replace the group. Raises TargetFailedError in a crash loop or on shutdown."""
        self.mark_lost()
        group = super().restart()
        if group is None:
            raise TargetFailedError("the service is shutting down")
        return group

    def forgive_losses(self) -> None:
        """Begin the count of a crash loop again: a request caused the losses, and has ended."""
        self._backoff.forgive()

    def check(self, report: Callable[[TargetFailedError], None]) -> None:
        """Report a rank that died while no step ran. Blocking; from any thread."""
        group = self._group
        if group is None:
            return
        try:
            group.check_alive()
        except TargetFailedError as error:
            if group is self._group:  # otherwise a step has detected it too
                report(error)

    def _delay_s(self) -> float:
        delay_s = super()._delay_s()
        if self._backoff.num_failures > MAX_FAILURES:
            raise TargetFailedError(f"it failed {MAX_FAILURES} times in a row")
        return delay_s


class DraftSupervisor(Supervisor[DraftStep, DraftOutput]):
    """A proposer that drafts while it has a worker group, and otherwise proposes nothing.

    A lost group is restarted in the background, indefinitely: without drafts the service is slower,
    not broken. A new group has no KV cache; its proposer catches up on the running sequences. It
    plans its drafts ahead from what was observed with the groups before. It loads the adapters of
    the group before, and drafts when it has them.
    """

    _model = "draft model"

    def __init__(
        self,
        start: Callable[[], WorkerGroup[DraftStep, DraftOutput]],
        limits: DraftLimits,
        vocabulary: DraftVocabulary,
        spare: SpareRanks[DraftStep, DraftOutput] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the first group. spare: to keep while there is a group; `start` uses it."""
        super().__init__(start, clock)
        self._spare = spare
        self._limits = limits
        self._vocabulary = vocabulary
        self._proposer: DraftModelProposer | None = None
        self._drafting: WorkerGroup[DraftStep, DraftOutput] | None = None  # the proposer's
        self._planner = OutcomePlanner(clock)
        self._counts = Counts()  # of the proposers of lost groups
        self._adapters: dict[int, AdapterFile] = {}  # by id, which every group is to load
        self.num_late_drafts = 0  # steps that went on without drafts
        self.num_moves = 0  # to another worker, for the load of the one before

    def take(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return drafts; none without a group, or while one has not answered an earlier step."""
        self._follow_group()
        proposer, group = self._proposer, self._drafting
        if proposer is None or group is None:
            return []
        try:
            return [] if group.poll_late() else proposer.take(requests)
        except TimeoutError:
            self.num_late_drafts += 1
            return []
        except Exception as error:
            self._recover(error)
            return []

    def ahead(self, rows: Sequence[SentRow]) -> None:
        """Draft ahead, if there is a group that has answered all earlier steps."""
        proposer, group = self._proposer, self._drafting
        if proposer is None or group is None:
            return
        try:
            if not group.poll_late():
                proposer.ahead(rows)
        except Exception as error:
            self._recover(error)

    def end_step(self, *, is_lost: bool = False) -> None:
        """Measure the target's step, also if the group was lost in it."""
        self._planner.end_step(is_lost=is_lost)

    @property
    def counts(self) -> Counts:
        """What the proposers of all groups have counted."""
        current = self._proposer
        return self._counts if current is None else self._counts.plus(current.counts)

    def release(self, seq_id: int) -> None:
        """Release a sequence."""
        if self._proposer is not None:
            self._proposer.release(seq_id)

    def load_adapter(self, adapter: AdapterFile) -> None:
        """See AdapterDrafter; later groups load it too."""
        self._adapters[adapter.adapter_id] = adapter
        self._follow_group()
        self._with_proposer(lambda proposer: proposer.load_adapter(adapter), None)

    def adapter_fault(self, adapter_id: int) -> str | None:
        """See AdapterDrafter."""
        no_fault: str | None = ""
        return self._with_proposer(lambda proposer: proposer.adapter_fault(adapter_id), no_fault)

    def unload_adapter(self, adapter_id: int) -> None:
        """See AdapterDrafter."""
        self._adapters.pop(adapter_id, None)
        self._with_proposer(lambda proposer: proposer.unload_adapter(adapter_id), None)

    def _with_proposer(
        self, function: Callable[[DraftModelProposer], Result], without: Result
    ) -> Result:
        """Return what a function of the proposer returns; `without` where there is none."""
        if self._proposer is None:
            return without
        try:
            return function(self._proposer)
        except Exception as error:
            self._recover(error)
            return without

    def check(self) -> None:
        """Detect a rank that died while no step ran, and replace a spare that was used or died.

        Also reads an output that is late, which no step may do for a while.
        """
        group = self._group
        if group is None:
            return
        try:
            group.check_alive()
            group.keep_seats()
            group.poll_late()
        except Exception as error:
            self._recover(error)
            return
        if self._spare is not None:
            self._spare.maintain(group)

    def close(self) -> None:
        """See Supervisor; also ends the spare."""
        super().close()
        if self._spare is not None:
            self._spare.close()

    def measure(self, measure: Callable[[DraftWorker], Result]) -> Result | None:
        """Return what `measure` measures on the group, before there is a sequence.

        Returns None where the group is lost.
        """
        if self._group is None:
            return None
        try:
            return measure(self._group)
        except Exception as error:
            self._recover(error)
            return None

    def _follow_group(self) -> None:
        """Replace the proposer after a restart."""
        group = self._group
        if group is None or group is self._drafting:
            return
        if self.num_restarts + self.num_moves:
            logger.warning("drafting again, with a new worker")
        self._drafting, group.gives_up = group, True
        self._proposer = DraftModelProposer(group, self._limits, self._vocabulary.new_adapter())
        self._proposer.keep_observations(self._planner)
        self._with_proposer(self._load_adapters, None)

    def _leave_proposer(self) -> None:
        """Stop using the proposer; the next one has no KV cache."""
        self._counts, self._proposer, self._drafting = self.counts, None, None

    def _load_adapters(self, proposer: DraftModelProposer) -> None:
        for adapter in self._adapters.values():
            proposer.load_adapter(adapter)

    def _recover(self, error: Exception) -> None:
        """Restart the group in the background, after any error: none may affect a request."""
        is_known = isinstance(error, DraftFailedError)
        logger.warning("going on without drafts: %s", error, exc_info=None if is_known else error)
        self.mark_lost()
        self._leave_proposer()
        threading.Thread(target=self.restart, name="draft-restart", daemon=True).start()
