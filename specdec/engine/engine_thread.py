"""Runs an engine on its own thread and streams its outputs to asyncio."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import nullcontext, suppress
from operator import attrgetter
from typing import Any, TypeVar

from specdec.engine.commands import Command, Outcome, settle
from specdec.engine.engine import Engine
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.engine.requests.open_requests import require_room
from specdec.engine.requests.output_streams import OutputStreams
from specdec.engine.requests.outputs import TargetLostError
from specdec.sequences.sequence import EngineRequest
from specdec.types.control import SpeculationControl
from specdec.types.deadline import Deadline
from specdec.types.errors import NotReadyError, TargetFailedError
from specdec.types.ranks import Target
from specdec.types.reports.stats import EngineStats
from specdec.types.request import OWN_PROCESS, Caller
from specdec.types.responses import EngineOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RECOVERY_TICK_S = 0.5

_STALL_TICK_S = 0.002
"""Between two looks whether the ranks have loaded the adapter that all sequences wait for."""

_SWITCH_INTERVAL_S = 0.0005
"""Longest wait for the interpreter lock, which the engine's thread acquires several times per step.

With Python's default of 5 ms another busy thread delays each step by several times that."""

_STATS_PERIOD_S = 0.02
"""The age limit of `last_stats` while steps run: they take as long to make as a schedule."""

_finish_reason, _error = attrgetter("finish_reason"), attrgetter("error")

_DRAIN_GRACE_S = 1.0
"""How long `drain` waits for streams that it has ended: their readers may have stalled."""


class EngineThread:
    """Bridge between one engine and one event loop.

    Only its thread touches the engine. Commands reach it through a queue, on which the thread
    blocks while there is no work. The outputs of a step reach the event loop in one call.

    When the target is lost, streams pause until another one has started, and then continue.
    """

    def __init__(
        self,
        engine: Engine,
        restart_target: Callable[[], Target] | None = None,
        on_target_lost: Callable[[], None] = lambda: None,
        on_loss_explained: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread. Call it on the event loop that reads the streams.

        Shortens the interpreter's switch interval for all threads of the process.

        restart_target: runs on another thread; raises when no target can be started any more. None:
            the engine ends with its target.
        on_target_lost: runs on the engine's thread before `restart_target`, so that this thread
            uses the lost target no longer.
        on_loss_explained: runs on the engine's thread after a loss whose cause, a request, has been
            ended, once the next target has generated tokens: it is in order.
        """
        self._engine = engine
        self._restart_target = restart_target
        self._on_target_lost = on_target_lost
        self._on_loss_explained = on_loss_explained
        self._is_loss_explained = False  # a request has ended as its cause, and no step has run yet
        self.event_loop = asyncio.get_running_loop()
        self._streams = OutputStreams()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._outcomes: list[Outcome] = []  # of commands, not returned yet
        self.failure: TargetFailedError | None = None  # why the engine stopped for good
        self.is_recovering = False  # streams are paused while the target restarts
        self.is_draining = False  # new requests are rejected because the service stops
        self._is_closed = self._has_ended = False
        # At most 20 ms old while steps run, and exact once a choice has ended.
        self.last_stats, self._stats_at_s = engine.stats(), 0.0
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_streams(self) -> int:
        """Requests that have not ended, queued or running."""
        return self._streams.num_requests

    @property
    def num_sequences(self) -> int:
        """The choices of those requests that have not ended. Thread-safe."""
        return self._streams.num_sequences

    async def generate(
        self,
        request: EngineRequest,
        metrics: RequestMetrics | None = None,
        caller: Caller = OWN_PROCESS,
        deadline: Deadline | None = None,
        *,
        is_admitted: bool = False,
        on_admitted: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Stream a request's outputs, one per step and choice, or fewer for a reader that is late.

        Leaving early aborts the request. Its id need not be unique; the outputs have another.
        Raises what `Engine.add` raises, the error of a failed output, TargetFailedError when the
        engine is lost, NotReadyError while draining, and `deadline.error`.
        caller: may abort it. is_admitted: it continues an admitted request, so that neither a drain
            nor a full queue rejects it. on_admitted: called when the engine has accepted it.
        """
        self._admit(request, metrics, is_admitted=is_admitted)
        unique_id, finished = self._streams.open(request, metrics, caller, deadline), False
        try:
            async with deadline.enforce() if deadline else nullcontext():
                await self.call(lambda: self._engine.add(request.with_id(unique_id)))
            on_admitted()
            while not finished:
                output = await self._streams.next_output(unique_id)
                finished = output.is_last
                yield output
        finally:
            self._streams.close(unique_id)
            if not finished:
                self.post(lambda: self._engine.abort(unique_id))
                if metrics is not None:
                    metrics.on_broken_off(sys.exception())

    def _admit(
        self, request: EngineRequest, metrics: RequestMetrics | None, *, is_admitted: bool
    ) -> None:
        try:
            if not is_admitted:
                self._require_admission(request.params.n)
        except Exception as error:
            if metrics is not None:
                metrics.on_broken_off(error)
            raise

    def _require_admission(self, num_choices: int) -> None:
        if self.is_draining:
            raise NotReadyError("the service is draining; send the request again")
        self.require_room(num_choices)

    def require_room(self, num_choices: int = 1) -> None:
        """Raise OverloadedError if `num_choices` more do not fit; see open_requests.require_room.

        Does not block. It spares the encoding of a request under overload; `generate` checks again.
        """
        require_room(self._engine.config, self.num_sequences, num_choices)

    def abort(self, request_id: str) -> None:
        """End the streams of the requests with this id, which then raise AbortedError."""
        self.abort_where(lambda each, caller: each == request_id)

    def abort_where(self, is_ended: Callable[[str, Caller], bool]) -> None:
        """End streams likewise. is_ended: of a request's id and its caller."""
        self._streams.abort(is_ended)

    async def stats(self) -> EngineStats:
        """Return the engine's stats, taken between two steps."""
        return await self.call(self._engine.stats)

    async def set_speculation(self, control: SpeculationControl) -> None:
        """Put settings in force; the next step goes by them when this returns."""
        await self.call(lambda: self._engine.set_speculation(control))

    async def clear_prefix_cache(self) -> bool:
        """Empty the prefix cache unless requests run or wait; return whether it was emptied."""
        return await self.call(self._engine.clear_prefix_cache)

    def mark_target_lost(self, error: TargetFailedError) -> None:
        """Report that the target is lost, for when no step has noticed."""
        self.post(lambda: self._recover(error))

    async def drain(self, timeout_s: float) -> None:
        """Reject new requests, wait for the open ones, and end those left after `timeout_s`."""
        self.is_draining = True
        if await self._streams.all_close_within(timeout_s):
            return
        self._streams.fail(NotReadyError("the service stopped before the answer was complete"))
        await self._streams.all_close_within(_DRAIN_GRACE_S)

    async def close(self) -> None:
        """Stop the thread after the step in flight; open streams end with an error."""
        self._is_closed = True
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Stop like `close`, from any thread; the engine's own thread does not wait."""
        self._is_closed = True
        self._commands.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector runs here too
            self._thread.join()
        self._notify(self._streams.fail, NotReadyError("the service is shutting down"))

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread, between two steps, without waiting for it."""
        self._commands.put(Command(function))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return its result."""
        if self._is_closed:
            raise NotReadyError("the service is shutting down")
        result: asyncio.Future[T] = self.event_loop.create_future()
        self._commands.put(Command(function, result))
        if self._has_ended:  # meanwhile, on another thread
            self._refuse_commands()
        return await result

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._advance()
        finally:
            self._has_ended = True  # before the queue is emptied, so that no command is left in it
            self._refuse_commands()
            self._update_stats(now=True)

    def _run_commands(self) -> bool:
        """Run the queued commands, blocking while there is no other work; return False to stop."""
        while True:
            try:
                command = self._next_command()
            except queue.Empty:
                return True
            if command is None:
                self._settle_commands()
                return False
            self._execute(command)

    def _next_command(self) -> Command | None:
        """Return a queued command, or the next one where there is no other work.

        Raises queue.Empty. The results of the commands before it are returned before a wait.
        """
        with suppress(queue.Empty):
            return self._commands.get_nowait()
        self._settle_commands()
        is_idle, timeout_s = self._idle()
        return self._commands.get(block=is_idle, timeout=timeout_s)

    def _settle_commands(self) -> None:
        """Return the results of commands, after the stats that include them."""
        if self._outcomes:
            self._update_stats(now=True)
            self._notify(settle, self._outcomes)
            self._outcomes = []

    def _idle(self) -> tuple[bool, float | None]:
        """Return whether to wait for a command, and for how long at most."""
        if self.is_recovering:  # queued requests may expire while the target restarts
            return not self._can_step, _RECOVERY_TICK_S
        if self._can_step and self._engine.is_stalled:
            return True, _STALL_TICK_S
        return not self._can_step, None

    @property
    def _can_step(self) -> bool:
        return self.failure is None and not self.is_recovering and self._engine.has_work

    def _advance(self) -> None:
        """Expire requests and run a step; after an error of ours the thread refuses all work."""
        try:
            if self._can_step or self.is_recovering:
                self._expire()
            if self._can_step:
                self._step()
        except Exception:
            logger.exception("the engine stopped")
            self._give_up(TargetFailedError("engine error"))

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except TargetLostError as error:
            self._deliver(error.outputs, self._engine.newly_scheduled)
            self._recover(error)
        else:
            self._deliver(outputs, self._engine.newly_scheduled)
            if self._is_loss_explained and any(output.token_ids for output in outputs):
                self._is_loss_explained = False
                self._on_loss_explained()

    def _deliver(
        self, outputs: Sequence[EngineOutput], newly_scheduled: tuple[str, ...] = ()
    ) -> None:
        """Send the outputs of a step to their streams, after the stats that include them."""
        has_end = any(map(_finish_reason, outputs)) or any(map(_error, outputs))
        self._update_stats(now=has_end or not self._engine.has_work)
        if outputs or newly_scheduled:
            self._notify(self._streams.deliver, outputs, newly_scheduled)

    def _expire(self) -> None:
        if expired := self._engine.expire(time.monotonic()):
            self._notify(self._streams.expire, expired)

    def _update_stats(self, *, now: bool) -> None:
        """Update `last_stats`, now or where it is too old."""
        now_s = time.monotonic()
        if now or now_s - self._stats_at_s >= _STATS_PERIOD_S:
            self.last_stats, self._stats_at_s = self._engine.stats(), now_s

    def _notify(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, unless that has been closed."""
        with suppress(RuntimeError):
            self.event_loop.call_soon_threadsafe(function, *arguments)

    def _execute(self, command: Command) -> None:
        try:
            if self.failure is not None:
                raise self.failure
            self._outcomes.append(Outcome(command, command.function()))
        except Exception as error:
            if command.result is None and error is not self.failure:
                logger.exception("a command without a caller failed")
            self._outcomes.append(Outcome(command, None, error))
            if isinstance(error, TargetFailedError):  # a message of another kind than a step
                self._recover(error)

    def _refuse_commands(self) -> None:
        """Settle the commands left in the queue. Thread-safe."""
        error = NotReadyError("the service is shutting down")
        with suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    self._notify(settle, [Outcome(command, None, error)])

    def _recover(self, error: TargetFailedError) -> None:
        if self.is_recovering or self.failure is not None:
            return
        if self._restart_target is None:
            self._give_up(error)
            return
        logger.warning("streams pause: %s", error)
        self.is_recovering = True
        try:
            self._end_cause()
        except Exception:
            logger.exception("the cause of the loss could not be ended")
            self._give_up(TargetFailedError("engine error"))
            return
        try:
            self._on_target_lost()
        except Exception:  # the restart shows whether another target can start nevertheless
            logger.exception("the lost target could not be ended")
        # On another thread, so that requests can be added and aborted meanwhile.
        threading.Thread(target=self._restart, name="recovery", daemon=True).start()

    def _end_cause(self) -> None:
        """End the request that caused the loss of the target, if that is known."""
        outputs = self._engine.record_loss()
        self._deliver(outputs)
        self._is_loss_explained = bool(outputs)

    def _restart(self) -> None:
        assert self._restart_target is not None
        try:
            target = self._restart_target()
        except Exception as error:
            failure = TargetFailedError(f"the target could not be started again: {error}")
            self.post(lambda: self._give_up(failure))
        else:
            self.post(lambda: self._resume(target))

    def _resume(self, target: Target) -> None:
        try:
            self._engine.replace_target(target)
        except Exception:
            logger.exception("the engine cannot continue")
            self._give_up(TargetFailedError("engine error"))
            return
        self.is_recovering = False
        logger.warning("streams continue with a new target")

    def _give_up(self, failure: TargetFailedError) -> None:
        logger.error("the engine ends: %s", failure)
        try:
            self._update_stats(now=True)
        finally:
            self.failure = failure
            self.is_recovering = False
            self._notify(self._streams.fail, failure)
