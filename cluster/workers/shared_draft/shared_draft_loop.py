"""The loop of a draft worker that several Routers share: a message at a time, fairly.

Each Router has a seat: a separate socket, a partition of the KV pool, and its share of the time.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from cluster.workers.messages import draft_serialization, serialization
from cluster.workers.messages.frames import Frames
from cluster.workers.messages.profile_messages import is_for_profiles
from cluster.workers.rank.draft_partition import DraftPartition
from cluster.workers.rank.draft_steps import DraftSteps
from cluster.workers.rank.worker import ModelWorker
from cluster.workers.shared_draft.draft_shares import DraftShares, Waiting
from cluster.workers.transport.transport import Endpoint, Listener, StepSocket
from specdec.worker import DraftModelRunner

logger = logging.getLogger(__name__)

SEAT_TIMEOUT_S = 30.0
"""A Router that sends nothing for so long, not even a heartbeat, loses its seat."""

_SEND_TIMEOUT_S = 1.0
"""A Router that does not read an answer for so long loses its seat: the others wait."""

_SETTLE_S = 3.0
"""Time between two Routers that move here: the use by the first one is measured then."""

_CHECK_PERIOD_MS = 1000


@dataclass
class _Seat:
    """A Router's place at the worker. socket: None until it has connected."""

    index: int
    partition: DraftPartition
    listener: Listener
    worker: ModelWorker
    received_at_s: float
    socket: StepSocket | None = None
    messages: deque[Frames] = field(default_factory=deque)

    @property
    def pollable(self) -> zmq.Socket[bytes] | int:
        """The object to wait for: a message, or before that the Router's connection."""
        return self.listener.pollable if self.socket is None else self.socket.pollable

    @property
    def is_urgent(self) -> bool:
        """Return whether a step of the Router's target waits for its first message."""
        frames = self.messages[0]
        return not is_for_profiles(frames) and draft_serialization.has_drafts(frames)


class SharedDraftLoop:
    """Executes the messages of Routers on one model.

    `admit` and `stop` may be called from any thread, everything else runs in that of `run`.
    """

    def __init__(
        self,
        runner: DraftModelRunner,
        num_seats: int,
        num_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_blocks: of each seat's partition; the runner's pool has those of all seats."""
        self._runner = runner
        self._num_seats = num_seats
        self._num_blocks = num_blocks
        self._clock = clock
        self.shares = DraftShares(clock)
        self._seats: dict[int, _Seat] = {}
        self._running: set[int] = set()  # seats whose message is executed; all but one are paused
        self._left: list[DraftPartition] = []  # whose sequences are still on the worker
        self._lock = threading.Lock()  # of the next three
        self._moved_at_s = -math.inf
        self._taken: set[int] = set()  # seats
        self._admitted: list[_Seat] = []  # that are not polled yet
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._is_stopped = False
        self._poller = zmq.Poller()
        self._seat_of: dict[zmq.Socket[bytes] | int, _Seat] = {}  # by pollable

    @property
    def num_taken(self) -> int:
        """Number of seats that are taken."""
        return len(self._taken)

    def admit(
        self, listen: Callable[[], Listener], most_taken: int, *, is_move: bool = False
    ) -> tuple[int, Endpoint] | None:
        """Open a socket for a Router, which has to connect; return the number of its seat with it.

        Returns None if none is free or more than `most_taken` are taken, and shortly after another
        Router has moved here. listen: opens the socket. is_move: see SeatRequest.
        """
        with self._lock:
            free, now_s = set(range(self._num_seats)) - self._taken, self._clock()
            is_early = is_move and now_s - self._moved_at_s < _SETTLE_S
            if not free or len(self._taken) > most_taken or is_early or self._is_stopped:
                return None
            if is_move:
                self._moved_at_s = now_s
            index = min(free)
            listener = listen()
            partition = DraftPartition(index, self._num_seats, self._num_blocks)
            steps = DraftSteps(self._runner, 0, partition, lambda: self.shares.share(index))
            worker = ModelWorker(self._runner, steps, index)
            self._taken.add(index)
            self._admitted.append(_Seat(index, partition, listener, worker, self._clock()))
        self._wake()
        return index, listener.endpoint

    def stop(self) -> None:
        """End `run` after the present message."""
        self._is_stopped = True
        self._wake()

    def run(self) -> None:
        """Execute messages until `stop`, or raise what a step raises."""
        try:
            while not self._is_stopped:
                waiting = self._waiting()
                self._receive(0 if waiting else _CHECK_PERIOD_MS)
                self._release_left()
                if waiting := self._waiting():
                    self._execute(self._seats[self.shares.first(waiting)])
                self._drop_silent()
        finally:
            self._is_stopped = True
            self._seat_admitted()
            for seat in tuple(self._seats.values()):
                self._close(seat)

    def _waiting(self) -> list[Waiting]:
        seats = self._seats.values()
        return [Waiting(seat.index, seat.is_urgent) for seat in seats if seat.messages]

    def _seat_admitted(self) -> None:
        """Begin to serve the Routers that were admitted."""
        with self._lock:
            admitted, self._admitted = self._admitted, []
        for seat in admitted:
            self._seats[seat.index] = seat
            self.shares.join(seat.index)

    def _release_left(self) -> None:
        """Release the sequences of Routers that have left, between two messages of others."""
        left, self._left = self._left, []
        for partition in left:
            self._runner.draft(partition.release_all())
            with self._lock:
                self._taken.discard(partition.index)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is full of wake-ups already
            os.write(self._wake_write, b"w")

    def _receive(self, timeout_ms: int) -> None:
        """Wait for a message, a connection or a new seat, and keep all that have arrived."""
        self._register()
        for pollable, _ in self._poller.poll(timeout_ms):
            if pollable == self._wake_read:
                os.read(self._wake_read, 4096)
            elif (seat := self._seat_of.get(pollable)) is not None:
                self._read(seat)

    def _register(self) -> None:
        """Have the poller wait for the present seats and for wake-ups."""
        self._seat_admitted()
        wanted = {seat.pollable: seat for seat in self._seats.values()}
        for pollable in self._seat_of.keys() - wanted.keys():
            self._poller.unregister(pollable)
        for pollable in wanted.keys() - self._seat_of.keys():
            self._poller.register(pollable, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._seat_of = wanted

    def _read(self, seat: _Seat) -> None:
        """Accept the connection of a Router, or read its next message; drop one that is gone."""
        seat.received_at_s = self._clock()
        if seat.socket is None:
            seat.socket = seat.listener.accept(_SEND_TIMEOUT_S)
            logger.info("Router %d is connected", seat.index)
            return
        try:
            frames = seat.socket.receive()
        except OSError:  # it has closed its end, or stopped within a message
            frames = serialization.STOP
        if frames == serialization.STOP:
            self._drop(seat, "has left")
        elif frames != serialization.HEARTBEAT:
            self._keep(seat, frames)

    def _keep(self, seat: _Seat, frames: Frames) -> None:
        if not seat.messages and seat.index not in self._running:
            self.shares.wait(seat.index)
        seat.messages.append(frames)

    def _execute(self, seat: _Seat) -> None:
        """Execute the first message of a seat, and measure how long it takes.

        Drafts ahead end for the next message of their Router, and pause for those of others that
        are due before. They keep no state in the model between two passes.
        """
        is_urgent, frames = seat.is_urgent, seat.messages.popleft()
        began_at_s, paused_s = self._clock(), 0.0

        def is_interrupted() -> bool:
            nonlocal paused_s
            while True:
                self._receive(0)
                if seat.messages or not self._has(seat):
                    return True
                ran_s = self._clock() - began_at_s - paused_s
                other = self.shares.due_before(seat.index, ran_s, self._waiting())
                if other is None or other in self._running:  # then those of another have to end
                    return other is not None
                paused_at_s = self._clock()
                self._execute(self._seats[other])
                paused_s += self._clock() - paused_at_s

        self._running.add(seat.index)
        try:
            for answer in self._answers(seat, frames, is_interrupted):
                if self._has(seat) and seat.socket is not None:
                    seat.socket.send(answer)
        except OSError:
            self._drop(seat, "does not read its answers")
        finally:
            self._running.remove(seat.index)
        if self._has(seat):
            seat.received_at_s = self._clock()  # until then it may have waited for the answer
            seconds = seat.received_at_s - began_at_s - paused_s
            self.shares.record(seat.index, seconds, is_urgent=is_urgent)

    def _has(self, seat: _Seat) -> bool:
        """Return whether a Router still has its seat."""
        return self._seats.get(seat.index) is seat

    def _answers(
        self, seat: _Seat, frames: Frames, is_interrupted: Callable[[], bool]
    ) -> Iterator[Frames]:
        """Yield the answers to a message; report an error to its Router, and raise it.

        The worker ends then, as one that a single Router uses: its state is not known.
        """
        try:
            yield from seat.worker.run(frames, is_interrupted)
        except OSError:
            raise
        except Exception as error:
            logger.exception("a step of Router %d failed", seat.index)
            yield serialization.encode_error(f"{type(error).__name__}: {error}")
            raise

    def _drop_silent(self) -> None:
        """Drop Routers that are silent, also after a look at what arrived during a long step."""
        if self._silent():
            self._receive(0)
        for seat in self._silent():
            self._drop(seat, f"has sent nothing for {SEAT_TIMEOUT_S:g} s")
        for seat in tuple(self._seats.values()):
            if seat.listener.poll_lost():
                self._drop(seat, "cannot be reached")

    def _silent(self) -> list[_Seat]:
        now_s = self._clock()
        return [
            seat
            for seat in self._seats.values()
            if now_s - seat.received_at_s > SEAT_TIMEOUT_S and not seat.messages
        ]

    def _drop(self, seat: _Seat, reason: str) -> None:
        """Free the seat of a Router."""
        if not self._has(seat):
            return
        logger.info("Router %d %s", seat.index, reason)
        self._left.append(seat.partition)
        self._close(seat)

    def _close(self, seat: _Seat) -> None:
        if (pollable := seat.pollable) in self._seat_of:
            self._poller.unregister(pollable)
            del self._seat_of[pollable]
        del self._seats[seat.index]
        self.shares.leave(seat.index)
        if seat.socket is not None:
            seat.socket.close()
        seat.listener.close()
