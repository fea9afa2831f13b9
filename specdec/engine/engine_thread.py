"""Runs an engine in a thread of its own, and hands what it makes to asyncio streams."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from specdec.engine.engine import Engine
from specdec.engine.outputs import RequestOutput
from specdec.engine.request_metrics import AbortedError, RequestObserver
from specdec.engine.scheduler import require_room
from specdec.sequences.sequence import EngineRequest
from specdec.types.control import SpeculationControl
from specdec.types.errors import NotReadyError, OverloadedError, TargetFailedError
from specdec.types.stats import EngineStats
from specdec.types.worker import Target

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RECOVERY_TICK_S = 0.5

_SWITCH_INTERVAL_S = 0.0005
"""How long the engine's thread waits for another thread of Python, several times a step.

Python's own 5 ms are most of a step while the other renders a long chat, say."""

_STATS_PERIOD_S = 0.02
"""How old the load may be that is told while steps run: to sum it up takes as long as it would to
schedule a step."""

_LAST_WORDS_S = 1.0
"""How long a stream that is ended by force may take to say so: its reader may have stopped."""


@dataclass(frozen=True)
class _Command:
    """A call to make on the engine's thread, and where its result goes; None where nobody waits."""

    function: Callable[[], Any]
    result: asyncio.Future[Any] | None = None


@dataclass(frozen=True)
class _Stream:
    """Where the outputs of one request go; None where nobody observes it."""

    observer: RequestObserver | None
    outputs: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)


class EngineLoop:
    """The bridge between one engine and one event loop.

    The engine is touched by its thread alone. Commands reach it through a queue, on which the
    thread sleeps while there is nothing to do. Outputs of a step reach the event loop together.

    When the target is lost, streams pause while another is made, and then go on.
    """

    def __init__(
        self,
        engine: Engine,
        remake_target: Callable[[], Target] | None = None,
        observe_batch: Callable[[int], None] | None = None,
        on_target_lost: Callable[[], None] | None = None,
    ) -> None:
        """Must be made on the event loop that will read the streams. Starts the thread.

        Shortens the interpreter's switch interval, for all threads of the process.

        remake_target: called on a thread of its own; raises when no target can be had any more.
            None: the engine ends with its target.
        observe_batch: told on the engine's thread how many sequences a step brought tokens to.
        on_target_lost: called on the engine's thread before `remake_target` is, which may then do
            away with the lost one: whatever else that thread does with it has to end there.
        """
        self._engine = engine
        self._remake_target = remake_target
        self._observe_batch = observe_batch
        self._on_target_lost = on_target_lost
        self._is_recovering = False
        self._event_loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._open: dict[str, int] = {}  # of those of them that go on, how many choices do
        self._serial = itertools.count()
        self._failure: TargetFailedError | None = None
        self._closed = False
        self._has_ended = False
        self._last_stats, self._stats_at = engine.stats(), 0.0
        self._is_draining = False
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> TargetFailedError | None:
        """Why the engine stopped for good; None while it runs."""
        return self._failure

    @property
    def is_recovering(self) -> bool:
        """Whether streams are paused because the target is being made again."""
        return self._is_recovering

    @property
    def last_stats(self) -> EngineStats:
        """The engine's load, at most 20 ms old while steps run, and exact once a choice has ended.

        At once, and from any thread.
        """
        return self._last_stats

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused, because the service stops."""
        return self._is_draining

    @property
    def num_streams(self) -> int:
        """Requests that have begun and not ended, whether they wait or run."""
        return len(self._open)

    @property
    def num_sequences(self) -> int:
        """The choices of those requests that have not ended. From any thread."""
        return sum(tuple(self._open.values()))  # a copy, made at once

    def lose_target(self, error: TargetFailedError) -> None:
        """Tells the loop that the target is lost, for when no step has noticed."""
        self.post(lambda: self._recover(error))

    async def generate(
        self, request: EngineRequest, observer: RequestObserver | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams a request's outputs, one a step and choice. Leaving early aborts the request.

        Raises what `Engine.add` raises, the error of an output that has one, TargetFailedError when
        the engine is lost, and NotReadyError once the loop drains. The request's id need not be
        unique.
        """
        unique_id = f"{request.request_id}/{next(self._serial)}"
        stream = self._admit(unique_id, request.params.n, observer)
        finished = False
        try:
            await self.call(lambda: self._engine.add(replace(request, request_id=unique_id)))
            while not finished:
                output = await stream.outputs.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.is_last
                yield output._replace(request_id=request.request_id)
        finally:
            del self._streams[unique_id]
            self._open.pop(unique_id, None)
            if not self._streams:
                self._no_streams.set()
            if not finished:
                self._commands.put(_Command(lambda: self._engine.abort(unique_id)))
                if observer is not None:
                    observer.on_broken_off(sys.exception())

    def _admit(self, unique_id: str, num_choices: int, observer: RequestObserver | None) -> _Stream:
        """Opens a stream. Raises NotReadyError and what `require_room` raises; observed as ends."""
        try:
            if self._is_draining:
                raise NotReadyError("the service is draining; send the request again")
            self.require_room(num_choices)
        except Exception as error:
            if observer is not None:
                observer.on_broken_off(error)
            raise
        stream = self._streams[unique_id] = _Stream(observer)
        self._open[unique_id] = num_choices
        self._no_streams.clear()
        return stream

    def require_room(self, num_choices: int = 1) -> None:
        """Raises what `specdec.engine.scheduler.require_room` raises, of all requests that are open.

        At once, where the engine would only be asked after the step that runs.
        """
        require_room(self._engine.config, self.num_sequences, num_choices)

    def abort(self, request_id: str) -> None:
        """Ends the streams of the requests with this id, which then raise AbortedError."""
        for unique_id, stream in self._streams.items():
            if unique_id.rpartition("/")[0] == request_id:
                stream.outputs.put_nowait(AbortedError(request_id))

    async def stats(self) -> EngineStats:
        """The engine's load, as of between two steps."""
        return await self.call(self._engine.stats)

    async def set_speculation(self, control: SpeculationControl) -> None:
        """Takes over what an operator wants; returns when the next step goes by it."""
        await self.call(lambda: self._engine.set_speculation(control))

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests; returns when the open ones have ended, at the latest by force."""
        self._is_draining = True
        if await self._streams_end_within(timeout_s):
            return
        self._fail_streams(NotReadyError("the service stopped before the answer was complete"))
        await self._streams_end_within(_LAST_WORDS_S)

    async def _streams_end_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._no_streams.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stops the thread after the step in flight; streams still open end with an error."""
        self._ask_to_stop()
        await asyncio.to_thread(self._wait_until_stopped)

    def stop(self) -> None:
        """The same, for any thread; one that is the engine's own does not wait."""
        self._ask_to_stop()
        self._wait_until_stopped()

    def _ask_to_stop(self) -> None:
        self._closed = True
        self._commands.put(None)

    def _wait_until_stopped(self) -> None:
        if threading.current_thread() is not self._thread:  # where garbage may be collected too
            self._thread.join()
        self._notify(self._fail_streams, NotReadyError("the service is shutting down"))

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The one that reads the streams."""
        return self._event_loop

    def post(self, function: Callable[[], None]) -> None:
        """Has a function run on the engine's thread, between two steps, and does not wait."""
        self._commands.put(_Command(function))

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread, between two steps."""
        if self._closed:
            raise NotReadyError("the service is shutting down")
        result: asyncio.Future[T] = self._event_loop.create_future()
        self._commands.put(_Command(function, result))
        if self._has_ended:  # meanwhile, on another thread
            self._refuse_commands()
        return await result

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self._has_step_to_run:
                    self._step()
                elif self._is_recovering:
                    self._expire()
        finally:
            self._has_ended = True  # before the queue is emptied, so that none is left in it
            self._refuse_commands()
            self._sum_up(at_once=True)

    def _refuse_commands(self) -> None:
        """Settles those that the thread has left behind; from any thread."""
        error = NotReadyError("the service is shutting down")
        with suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    self._notify(_settle, command.result, None, error)

    @property
    def _has_step_to_run(self) -> bool:
        is_able = self._failure is None and not self._is_recovering
        return is_able and self._engine.has_work

    def _step(self) -> None:
        try:
            self._expire()
            outputs = self._engine.step()
            has_end = any(output.finish_reason or output.error for output in outputs)
            self._sum_up(at_once=has_end or not self._engine.has_work)
        except TargetFailedError as error:
            self._recover(error)
        except Exception:
            logger.exception("the engine stopped")
            self._give_up(TargetFailedError("engine error"))
        else:
            self._tell(outputs, self._engine.begun, self._engine.last_batch_size)

    def _sum_up(self, *, at_once: bool) -> None:
        """Takes the engine's load, at once or where the last one is too old."""
        now = time.monotonic()
        if at_once or now - self._stats_at >= _STATS_PERIOD_S:
            self._last_stats, self._stats_at = self._engine.stats(), now

    def _tell(self, outputs: list[RequestOutput], begun: tuple[str, ...], batch_size: int) -> None:
        """Wakes the event loop once for all that a step has to say, if it has anything."""
        if batch_size and self._observe_batch is not None:
            self._observe_batch(batch_size)
        if outputs or begun:
            self._notify(self._deliver, outputs, begun)

    def _notify(self, function: Callable[..., None], *arguments: Any) -> None:
        """Has the event loop call a function; one that has been closed has nobody left to tell."""
        with suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(function, *arguments)

    def _expire(self) -> None:
        expired = self._engine.expire(time.monotonic())
        if expired:
            self._notify(self._refuse, expired)

    def _recover(self, error: TargetFailedError) -> None:
        if self._is_recovering or self._failure is not None:
            return
        if self._remake_target is None:
            self._give_up(error)
            return
        logger.warning("streams pause: %s", error)
        self._is_recovering = True
        if self._on_target_lost is not None:
            self._on_target_lost()
        threading.Thread(target=self._make_target, name="recovery", daemon=True).start()

    def _make_target(self) -> None:
        """Runs on a thread of its own, so that requests can come and go meanwhile."""
        assert self._remake_target is not None
        try:
            target = self._remake_target()
        except Exception as error:
            failure = TargetFailedError(f"the target could not be started again: {error}")
            self._commands.put(_Command(lambda: self._give_up(failure)))
        else:
            self._commands.put(_Command(lambda: self._resume(target)))

    def _resume(self, target: Target) -> None:
        try:
            self._engine.replace_target(target)
        except Exception:
            logger.exception("the engine cannot go on")
            self._give_up(TargetFailedError("engine error"))
            return
        self._is_recovering = False
        logger.warning("streams go on with a new target")

    def _give_up(self, failure: TargetFailedError) -> None:
        logger.error("the engine ends: %s", failure)
        self._sum_up(at_once=True)
        self._failure = failure
        self._is_recovering = False
        self._notify(self._fail_streams, failure)

    def _run_commands(self) -> bool:
        """Runs what is queued, waiting for it when there is no other work; False to stop."""
        while True:
            idle = not self._has_step_to_run
            # While the target is made again, requests go on waiting, and may wait too long.
            timeout_s = _RECOVERY_TICK_S if self._is_recovering else None
            try:
                command = self._commands.get(block=idle, timeout=timeout_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._execute(command)

    def _execute(self, command: _Command) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            value = command.function()
            self._sum_up(at_once=True)
        except Exception as error:
            if command.result is None and error is not self._failure:
                logger.exception("a command that nobody waits for failed")
            self._notify(_settle, command.result, None, error)
        else:
            self._notify(_settle, command.result, value, None)

    def _deliver(self, outputs: list[RequestOutput], begun: tuple[str, ...]) -> None:
        delivered_at = time.perf_counter()
        self._note_begun(begun, delivered_at)
        for output in outputs:
            if output.finish_reason is not None and output.request_id in self._open:
                self._open[output.request_id] -= 1
            if output.is_last:
                self._open.pop(output.request_id, None)
            stream = self._streams.get(output.request_id)
            if stream is None:  # its reader has left, and the abort is on its way
                continue
            if output.error is not None:
                logger.error("request %s ends: %s", output.request_id, output.error)
                stream.outputs.put_nowait(output.error)
                continue
            stream.outputs.put_nowait(output)
            if stream.observer is not None:
                stream.observer.on_output(output, delivered_at)

    def _note_begun(self, request_ids: tuple[str, ...], at: float) -> None:
        streams = (self._streams.get(request_id) for request_id in request_ids)
        for stream in streams:
            if stream is not None and stream.observer is not None:
                stream.observer.on_begun(at)

    def _refuse(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.outputs.put_nowait(OverloadedError("the request waited longer than it may"))

    def _fail_streams(self, error: Exception) -> None:
        self._open.clear()
        for stream in self._streams.values():
            stream.outputs.put_nowait(error)


def _settle(result: asyncio.Future[Any] | None, value: Any, error: Exception | None) -> None:
    if result is None or result.done():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)
