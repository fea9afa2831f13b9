"""Tensor-parallel group of worker actors: started together, reached by sockets, lost together."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, NoReturn

import zmq
from ray.util.placement_group import PlacementGroup

from cluster.workers.group_spec import GroupSpec
from cluster.workers.groups.ranks import OpenRanks, Ranks
from cluster.workers.groups.roles import OutputT, Role, StepT, num_tokens
from cluster.workers.groups.step_deadline import StepDeadline
from cluster.workers.messages import draft_serialization, serialization
from cluster.workers.messages.frames import Frames
from cluster.workers.messages.load_messages import LoadInbox
from cluster.workers.messages.profile_messages import (
    END,
    WRITING_S,
    ProfileInbox,
    WorkerProfileOrder,
    is_report,
)
from cluster.workers.transport.transport import StepSocket
from cluster.workers.transport.unix_socket import PeerGoneError
from specdec.types.draft_messages import AheadOutput
from specdec.types.reports.profile import WorkerProfile

_LIVENESS_CHECK_PERIOD_MS = 500
_REASON_CHECK_PERIOD_MS = 10
_REASON_TIMEOUT_S = 1.0
"""Ray reports why a rank has ended a moment after its socket is closed."""
_MIN_STEP_TIMEOUT_S = 5.0
_STEP_TIMEOUT_FACTOR = 20.0
"""A pause of the machine or of a process should be shorter than these limits."""
_MIN_PATIENCE_S = 0.1
_PATIENCE_FACTOR = 5.0
"""A draft that takes longer than others is no longer worth waiting for."""
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _PendingStep:
    """A step that was sent, and whose output was not received."""

    step_id: int
    num_tokens: int
    sent_s: float


class WorkerGroup(Generic[StepT, OutputT]):
    """The ranks of one model: every step goes to all of them, and rank 0 answers.

    A rank that reports an error, dies, or misses a deadline loses the group: every later call
    raises the error of its role, and `close` kills the remaining ranks. Not thread-safe, except for
    `check_alive`.

    gives_up: whether `collect` stops waiting for an output that takes much longer than earlier ones
    of its size; False for the first ones, which are measured. patience: for these outputs. late_s:
    age in seconds of the first step that `poll_late` last found without its late output; 0 if it
    found none. The output may have arrived since.
    """

    def __init__(
        self,
        role: Role[StepT, OutputT],
        spec: GroupSpec,
        placement: PlacementGroup | None,
        open_ranks: OpenRanks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the ranks and wait until all are warm; kill them all if one does not start.

        open_ranks: to use instead of new ones, for which there must be a placement. clock:
        monotonic, in seconds.
        """
        self._role = role
        self._spec = spec
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: list[StepSocket] = []  # by rank
        self._rank_of: dict[Any, int] = {}  # by the socket's pollable
        self._closed_at_s: dict[int, float] = {}  # by rank that has closed its socket
        self._waits_since_s = math.inf  # the last step was sent, or the last answer received
        self._is_warm = False
        self._received: deque[tuple[int, Frames]] = deque()  # by rank, unprocessed
        self._pending: deque[_PendingStep] = deque()  # whose outputs are not collected
        self._num_late = 0  # the first ones of these, which `collect` has given up
        self.gives_up = False
        self.late_s = 0.0
        self._answered_s = self._previous_answer_s = 0.0  # when the last two answers arrived
        self._deadlines = StepDeadline(
            _MIN_STEP_TIMEOUT_S, spec.step_timeout_s, _STEP_TIMEOUT_FACTOR
        )
        self.patience = StepDeadline(
            _MIN_PATIENCE_S, spec.step_timeout_s, _PATIENCE_FACTOR, median, shares_sizes=True
        )
        self._num_catching_up = 0
        self._pending_ahead: deque[_PendingStep] = deque()  # whose drafts ahead have not arrived
        self._ahead: list[AheadOutput] = []  # arrived, and not collected
        self._profile: ProfileInbox | None = None
        self._had_extra = False  # `_extra_s`, of which some ended since the last output
        self.ranks = self._new_ranks(placement) if open_ranks is None else open_ranks
        try:
            self._wait_until_warm()
        except BaseException:
            self.kill()
            raise

    def begin(self, step: StepT) -> None:
        """Send a step to every rank. Its deadline runs from now, or from the last answer."""
        pending = _PendingStep(step.step_id, num_tokens(step), self._clock())
        if self._role.has_output(step):
            self._pending.append(pending)
        if self._role.drafts_ahead(step):
            self._pending_ahead.append(pending)
        self._num_catching_up += self._role.catches_up(step)
        self._waits_since_s = pending.sent_s
        self._send_to_all(self._role.encode(step))

    def collect(self) -> OutputT:
        """Wait for rank 0's output of the first step that has one and was not collected.

        Raises TimeoutError where it gives up. The output is discarded when it arrives; until then
        `poll_late` returns True, and no step may begin.
        """
        size = self._pending[0].num_tokens
        patience_s = self.patience.limit_s(size) if self.gives_up else math.inf
        try:
            while self._keep_for_later(frames := self._receive(patience_s)):
                pass
        except TimeoutError:
            self._num_late += 1
            raise
        return self._output(frames)

    def collect_ahead(self, *, wait: bool) -> list[AheadOutput]:
        """See DraftWorker; gives up as `collect` does, and then returns what has arrived."""
        while self._pending_ahead and (wait or self._has_answer()):
            size = self._pending_ahead[0].num_tokens
            patience_s = self.patience.limit_s(size) if self.gives_up and wait else math.inf
            try:
                is_kept = self._keep_for_later(self._receive(patience_s))
            except TimeoutError:
                break
            assert is_kept, "drafts that were not collected"
        outputs, self._ahead = self._ahead, []
        return outputs

    def poll_late(self) -> bool:
        """Read what has arrived; return whether an output that `collect` gave up is still to come.

        Raises the role's error, as `poll_busy` does.
        """
        while self._num_late and self._has_answer():
            frames = self._receive()
            if not self._keep_for_later(frames):
                # Its time counts neither as that of a step nor as that of a good draft.
                self.patience.record_late(*self._measured())
                self._decode(frames)
                self._num_late -= 1
        self.late_s = self._clock() - self._pending[0].sent_s if self._num_late else 0.0
        return self._num_late > 0

    def _keep_for_later(self, frames: Frames) -> bool:
        """Record an answer that is no output of `collect`; return whether it is one."""
        if frames == serialization.CAUGHT_UP:
            self._num_catching_up -= 1
            return True
        if not draft_serialization.is_ahead_output(frames):
            return False
        output, pending = (
            draft_serialization.decode_ahead_output(frames),
            self._pending_ahead.popleft(),
        )
        assert output.step_id == pending.step_id, "the drafts of another step"
        if output.is_whole:
            seconds = self._answered_s - max(pending.sent_s, self._previous_answer_s)
            self.patience.record(pending.num_tokens, seconds)
        self._ahead.append(output)
        return True

    def _output(self, frames: Frames) -> OutputT:
        if not (self._extra_s or self._had_extra):
            measured = self._measured()
            self._deadlines.record(*measured)
            self.patience.record(*measured)
        self._had_extra = False
        return self._decode(frames)

    def _measured(self) -> tuple[int, float]:
        """Return the tokens of the step that was answered, and the seconds that it took."""
        pending = self._pending[0]
        return pending.num_tokens, self._answered_s - max(pending.sent_s, self._previous_answer_s)

    def _decode(self, frames: Frames) -> OutputT:
        output, pending = self._role.decode(frames), self._pending.popleft()
        assert output.step_id == pending.step_id, "the output of another step"
        return output

    def poll_busy(self) -> bool:
        """Read what has arrived; return whether ranks may still run earlier prefill chunks."""
        while self._num_catching_up and self._has_answer():
            is_kept = self._keep_for_later(self._receive())
            assert is_kept, "drafts that were not collected"
        return self._num_catching_up > 0

    @property
    def num_ranks(self) -> int:
        """The tensor-parallel size."""
        return self._spec.tensor_parallel_size

    def keep_seats(self) -> None:
        """Send a heartbeat to ranks with seats, which only a closed socket reports as lost."""
        if self.ranks.are_shared:
            self._send_to_all(serialization.HEARTBEAT)
            self._has_answer()

    def begin_profile(self, order: WorkerProfileOrder) -> None:
        """Begin a profile on every rank, after the steps that were sent before."""
        self._profile = ProfileInbox(order, self.num_ranks)
        self._send_to_all(order.encode())

    def end_profile(self) -> None:
        """End the profile on the ranks where it is still active."""
        self._send_to_all(END)

    def collect_profile(self) -> tuple[WorkerProfile, ...] | None:
        """Return the profile of every rank, or None until all have arrived. Does not wait."""
        assert self._profile is not None, "no profile was begun"
        while self._read(0):
            pass
        return self._profile.reports

    def check_alive(self) -> None:
        """Raise the role's error if a rank has ended or is unreachable. From any thread."""
        if (loss := self.ranks.loss()) is not None:
            self._fail(loss.rank, loss.reason)
        for rank, closed_at_s in tuple(self._closed_at_s.items()):
            if self.ranks.are_shared or self._clock() - closed_at_s > _REASON_TIMEOUT_S:
                self._fail(rank, "has closed its socket")
        for rank, socket in enumerate(tuple(self._sockets)):
            if socket.poll_lost():
                self._fail(rank, "cannot be reached")

    def close(self) -> None:
        """Stop every rank: by a message, and by force if it does not respond."""
        for socket in self._sockets:
            socket.send_last(serialization.STOP)
        self.ranks.wait_until_ended(_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill every rank, as when one of them is lost."""
        self.ranks.kill()
        for socket in self._sockets:
            socket.close()
        self._sockets = []
        self._poller = zmq.Poller()
        self._context.term()

    def _new_ranks(self, placement: PlacementGroup | None) -> OpenRanks:
        """Start ranks and open their sockets. Raises the role's error if they are not placed."""
        assert placement is not None, "new ranks without a placement"
        try:
            return Ranks.opened(self._role.actor, self._spec, placement)
        except TimeoutError as error:
            raise self._role.error(f"the {self._spec.name} {error}") from error

    def _wait_until_warm(self) -> None:
        """Connect, and wait for the answer to an empty step, which follows every rank's warm-up.

        Detects a rank that ends meanwhile, and one that is not warm within `start_timeout_s`.
        """
        self._waits_since_s = self._clock()
        for rank, socket in enumerate(self.ranks.connect(self._context)):
            self._sockets.append(socket)
            self._poller.register(socket.pollable, zmq.POLLIN)
            self._rank_of[socket.pollable] = rank
        self._send_to_all(self._role.encode(self._role.empty_step))
        try:
            self._receive()
        except self._role.error:
            loss = self.ranks.loss()
            if loss is None or loss.cause is None:
                raise
            raise loss.cause from None  # of the files: it needs no words about ranks
        self._is_warm = True

    @property
    def _is_overdue(self) -> bool:
        """Return whether the next answer takes longer than it may."""
        limit_s = self._spec.step_timeout_s
        if not self._is_warm:
            limit_s = self._spec.start_timeout_s
        elif self._pending and not self._num_catching_up:
            limit_s = self._deadlines.limit_s(self._pending[0].num_tokens)
        return self._clock() > self._waits_since_s + limit_s + self._extra_s

    @property
    def _extra_s(self) -> float:
        """Time for what ranks do between two steps, in addition to the limit of a step."""
        return WRITING_S if self._profile and self._profile.reports is None else 0.0

    def _send_to_all(self, frames: Frames) -> None:
        for rank, socket in enumerate(self._sockets):
            try:
                socket.send(frames)
            except PeerGoneError:
                continue  # `_receive` raises the reason
            except TimeoutError as error:
                self._fail(rank, "does not read its messages", error)

    def _receive(self, patience_s: float = math.inf) -> Frames:
        """Wait for the next answer of rank 0. Raises the role's error when the group is lost.

        Raises TimeoutError after `patience_s`.
        """
        gives_up_s = self._clock() + patience_s
        while not self._received:
            left_ms = max(0.0, gives_up_s - self._clock()) * 1000
            if self._read(math.ceil(min(self._check_period_ms, left_ms))):
                continue
            self.check_alive()
            if self._is_overdue:
                raise self._role.error(f"the {self._spec.name} did not answer in time")
            if self._clock() > gives_up_s:
                raise TimeoutError(f"the {self._spec.name} is late")
        rank, frames = self._received.popleft()
        self._previous_answer_s, self._answered_s = self._answered_s, self._clock()
        if (reason := serialization.error_in(frames)) is not None:
            self._fail(rank, f"failed: {reason}")
        return frames

    def _has_answer(self) -> bool:
        """Return whether `_receive` returns or raises immediately. Raises for a lost rank."""
        while self._read(0):
            pass
        if (self._closed_at_s or self.ranks.are_shared) and not self._received:
            self.check_alive()
        return bool(self._received) or self._is_overdue

    @property
    def _check_period_ms(self) -> int:
        is_urgent = self._closed_at_s or self.ranks.are_shared  # whose loss Ray does not report
        return _REASON_CHECK_PERIOD_MS if is_urgent else _LIVENESS_CHECK_PERIOD_MS

    def _read(self, timeout_ms: int) -> bool:
        """Read one message, an answer or a profile report; return False if none arrives in time."""
        ready = self._poller.poll(timeout_ms)
        if not ready:
            return False
        pollable, _ = ready[0]
        rank = self._rank_of[pollable]
        try:
            frames = self._sockets[rank].receive()
        except PeerGoneError:
            self._poller.unregister(pollable)  # it would stay ready indefinitely
            self._closed_at_s[rank] = self._clock()
            return False
        except TimeoutError as error:
            self._fail(rank, "stopped within a message", error)
        if not self._take_report(frames):
            self._waits_since_s = self._clock()
            self._received.append((rank, frames))
        return True

    def _take_report(self, frames: Frames) -> bool:
        """Store a message that answers no step; return whether it was one."""
        if not is_report(frames):
            return False
        self._put(frames, self._profile)
        return True

    def _put(self, report: Frames, inbox: ProfileInbox | LoadInbox | None) -> None:
        """Store a report. The last one of an inbox begins a new limit, as ranks run steps again."""
        extra_s = self._extra_s
        if inbox is not None:
            inbox.take(report)
        if self._extra_s < extra_s:
            self._had_extra, self._waits_since_s = True, self._clock()

    def _fail(self, rank: int, reason: str, cause: Exception | None = None) -> NoReturn:
        raise self._role.error(f"rank {rank} of the {self._spec.name} {reason}") from cause
