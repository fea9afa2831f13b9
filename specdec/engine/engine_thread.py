"""Runs an engine on its own thread and streams its outputs to asyncio."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from specdec.engine.commands import Command, CommandQueue, Outcome, refuse, settle
from specdec.engine.engine import Engine
from specdec.engine.requests.engine_client import EngineClient
from specdec.engine.requests.outputs import Delivery, TargetLostError
from specdec.engine.requests.remote_streams import RemoteStreams, StreamSink
from specdec.sequences.sequence import EngineRequest
from specdec.types.control import SpeculationControl
from specdec.types.errors import NotReadyError, TargetFailedError
from specdec.types.ranks import Target
from specdec.types.reports.stats import EngineStats

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

_DRAIN_TICK_S = 0.02  # between two looks whether the streams of other processes have ended

_DRAIN_GRACE_S = 1.0
"""How long `drain` waits for streams that it has ended: their readers may have stalled."""


class EngineThread(EngineClient):
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
        super().__init__(engine.config, lambda: engine.tokenizer)
        self._remote = RemoteStreams()
        self.event_loop = asyncio.get_running_loop()
        self._commands = CommandQueue(self.event_loop)
        self._outcomes: list[Outcome] = []  # of commands, not returned yet
        self._are_stats_due = False  # after commands that they do not include
        self.failure: TargetFailedError | None = None  # why the engine stopped for good
        self.is_recovering = False  # streams are paused while the target restarts
        self._is_closed = self._has_ended = False
        # At most 20 ms old while steps run, and exact once a choice has ended.
        self.last_stats, self._stats_at_s = engine.stats(), 0.0
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_streams(self) -> int:
        """See EngineClient; those of other processes count as well."""
        return super().num_streams + len(self._remote)

    @property
    def num_sequences(self) -> int:
        """See EngineClient; those of other processes count as well."""
        return self._streams.num_sequences + self._remote.num_sequences

    def _add(self, request: EngineRequest, *, is_silent: bool) -> asyncio.Future[None]:
        add = partial(self._engine.add, request)
        result = self.event_loop.create_future()
        command = Command(add, result, is_brief=True, is_silent=is_silent)
        return self._call(command, self._commands.put_with_others)

    def _drop(self, unique_id: str) -> None:
        self.post(lambda: self._engine.abort(unique_id), is_brief=True)

    def submit(
        self,
        request: EngineRequest,
        sink: StreamSink,
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """Add a request of another process, without waiting for it. Thread-safe.

        request: its id is unique. on_end: called with the error of `generate`, or None, on the
        engine's thread.
        """

        def add() -> None:
            self.require_admission(request.params.n)
            self._engine.add(request)
            self._remote.open(request.request_id, request.params.n, sink)

        self._commands.put(Command(add, on_end=on_end, is_brief=True))
        self._refuse_if_ended()

    def withdraw(self, unique_id: str) -> None:
        """End a request of another process. Thread-safe."""
        self.post(lambda: self._withdraw(unique_id), is_brief=True)

    def withdraw_all(self, sink: StreamSink) -> None:
        """End the requests of a process that has ended. Thread-safe."""
        self.post(lambda: [*map(self._withdraw, self._remote.of(sink))])

    def _withdraw(self, unique_id: str) -> None:
        self._remote.close(unique_id)
        self._engine.abort(unique_id)

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
        if await self._all_close_within(timeout_s):
            return
        error = NotReadyError("the service stopped before the answer was complete")
        self._streams.fail(error)
        self.post(lambda: [*map(self._engine.abort, self._remote.fail(error))])
        await self._all_close_within(_DRAIN_GRACE_S)

    async def _all_close_within(self, timeout_s: float) -> bool:
        """Wait until no stream is open, here and in other processes; return whether none is."""
        ends_at_s = time.monotonic() + timeout_s
        while await self._streams.all_close_within(max(0.0, ends_at_s - time.monotonic())):
            if not self._remote:
                return True
            await asyncio.sleep(_DRAIN_TICK_S)
        return False

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
        error = NotReadyError("the service is shutting down")
        self._notify(self._streams.fail, error)
        self._remote.fail(error)

    def post(self, function: Callable[[], object], *, is_brief: bool = False) -> None:
        """Run a function on the engine's thread, between two steps, without waiting for it."""
        self._commands.put(Command(function, is_brief=is_brief))

    def call(self, function: Callable[[], T], *, is_brief: bool = False) -> asyncio.Future[T]:
        """Run a function on the engine's thread, between two steps; return its result to come."""
        result = self.event_loop.create_future()
        return self._call(Command(function, result, is_brief=is_brief), self._commands.put)

    def _call(self, command: Command, put: Callable[[Command], None]) -> asyncio.Future[Any]:
        assert command.result is not None, "a call without a result"
        if self._is_closed:
            raise NotReadyError("the service is shutting down")
        put(command)
        self._refuse_if_ended()
        return command.result

    def _refuse_if_ended(self) -> None:
        """Settle a command that was queued when the thread had ended."""
        if self._has_ended:
            self._refuse_commands()

    def _run(self) -> None:
        """Run commands and steps; after an error of ours all work is refused."""
        try:
            while self._run_commands():
                self._advance()
        except BaseException:  # Rust libraries panic with errors that are no Exception
            self._give_up_after_bug("the engine stopped")
        finally:
            self._has_ended = True  # before the queue is emptied, so that no command is left in it
            self._settle_commands()
            self._refuse_commands()
            self._update_stats(now=True)

    def _run_commands(self) -> bool:
        """Run the queued commands, and return their results; return False to stop."""
        while self._commands:
            command = self._commands.get()
            if command is None:
                return False
            self._execute(command)
        self._settle_commands()
        return True

    def _settle_commands(self) -> None:
        """Return the results of commands, after the stats that include them."""
        if self._are_stats_due:
            try:
                self._update_stats(now=bool(self._outcomes))
            except Exception:
                self._give_up_after_bug("the engine stopped")
        if self._outcomes:
            self._notify(settle, self._outcomes)
            self._outcomes = []

    @property
    def _can_step(self) -> bool:
        return self.failure is None and not self.is_recovering and self._engine.has_work

    def _advance(self) -> None:
        """Expire requests and run a step, or wait for a command where there is no step."""
        can_step = self._can_step
        if self.is_recovering:  # queued requests may expire while the target restarts
            self._commands.wait(_RECOVERY_TICK_S)
        elif not can_step:
            self._commands.wait(None)
            return
        elif self._engine.is_stalled:
            self._commands.wait(_STALL_TICK_S)
        if expired := self._engine.expire(time.monotonic()):
            self._notify(self._streams.expire, self._remote.expire(expired))
            can_step = self._can_step
        if can_step:
            self._step()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except TargetLostError as error:
            self._deliver(error.outputs.delivery, self._engine.newly_scheduled)
            self._recover(error)
        else:
            self._deliver(outputs.delivery, self._engine.newly_scheduled)
            if self._is_loss_explained and any(output.token_ids for output in outputs):
                self._is_loss_explained = False
                self._on_loss_explained()

    def _deliver(self, step: Delivery, newly_scheduled: tuple[str, ...] = ()) -> None:
        """Send the outputs of a step to their streams, after the stats that include them."""
        has_end = any(map(_finish_reason, step.outputs)) or any(map(_error, step.outputs))
        self._update_stats(now=has_end or not self._engine.has_work)
        own, begun = self._remote.deliver(step, newly_scheduled)
        if any(own) or begun:
            self._notify(self._streams.deliver, own, begun)

    def _update_stats(self, *, now: bool) -> None:
        """Update `last_stats`, now or where it is too old; they are final after a failure."""
        now_s = time.monotonic()
        if self.failure is None and (now or now_s - self._stats_at_s >= _STATS_PERIOD_S):
            self.last_stats, self._stats_at_s = self._engine.stats(), now_s
            self._are_stats_due = False

    def _notify(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, unless that has been closed."""
        with suppress(RuntimeError):
            self.event_loop.call_soon_threadsafe(function, *arguments)

    def _execute(self, command: Command) -> None:
        """Run a command; results wait for none that may take long, nor for a recovery."""
        if not command.is_brief:
            self._settle_commands()
        outcome, self._are_stats_due = command.run(self.failure), True
        if command.on_end is not None:
            command.on_end(outcome.error)
        elif not (command.is_silent and outcome.error is None):
            self._outcomes.append(outcome)
        if not command.is_brief:
            self._settle_commands()
        if isinstance(outcome.error, TargetFailedError):  # a message of another kind than a step
            self._settle_commands()
            self._recover(outcome.error)

    def _refuse_commands(self) -> None:
        """Settle the commands left in the queue. Thread-safe."""
        error = self.failure or NotReadyError("the service is shutting down")
        for command in self._commands.drain():
            if command is not None:
                refuse(command, error, self._notify)

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
            self._give_up_after_bug("the cause of the loss could not be ended")
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
        self._deliver(Delivery(outputs))
        self._is_loss_explained = bool(outputs)

    def _restart(self) -> None:
        assert self._restart_target is not None
        try:
            target = self._restart_target()
        except BaseException as error:
            failure = TargetFailedError(f"the target could not be started again: {error}")
            self.post(lambda: self._give_up(failure))
        else:
            self.post(lambda: self._resume(target))

    def _resume(self, target: Target) -> None:
        try:
            self._engine.replace_target(target)
        except Exception:
            self._give_up_after_bug("the engine cannot continue")
            return
        self.is_recovering = False
        logger.warning("streams continue with a new target")

    def _give_up_after_bug(self, effect: str) -> None:
        """Give up in the handler of an exception, which is logged with its effect."""
        logger.exception(effect)
        self._give_up(TargetFailedError("engine error"))

    def _give_up(self, failure: TargetFailedError) -> None:
        logger.error("the engine ends: %s", failure)
        try:
            self._update_stats(now=True)
        except Exception:
            logger.exception("the last stats are missing")
        self.failure = failure
        self.is_recovering = False
        self._notify(self._streams.fail, failure)
        self._remote.fail(failure)
