"""The Router's end of a front end: its requests, its calls and its measurements."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cluster.api.front_ends.channel import Channel, Message
from cluster.api.front_ends.messages import RECEIPT_MODEL, RouterState, Start
from cluster.api.front_ends.outputs import OutputEncoder
from cluster.replica.orders import INTERNAL_FAULT, AbortOrder
from cluster.replica.replica_router import ReplicaRouter
from specdec.engine.requests.outputs import Delivery
from specdec.sequences.sequence import EngineRequest
from specdec.types.errors import NotReadyError, SpecdecError
from specdec.types.reports.receipts import ReceiptModel
from specdec.types.reports.stats import Counts
from specdec.types.request import Caller

logger = logging.getLogger(__name__)

Method = Callable[[Any], AsyncGenerator[Any, None]]
"""Function that a front end can call: yields the results for an argument."""


class RouterEnd:
    """A StreamSink: the outputs of the requests of one front end go to it.

    num_streams: open ones, with those whose last output has not been read; None where a drain has
    begun since the last report.
    """

    def __init__(
        self,
        connected: socket.socket,
        router: ReplicaRouter,
        methods: Mapping[str, Method],
        start: Start,
        *,
        on_listening: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        on_result: Callable[[], None] = lambda: None,
    ) -> None:
        """methods: by the names by which the front end calls them.

        on_result: called before each result of a call is sent: it may have changed the state.
        """
        self.num_streams: int | None = 0
        self._on_result = on_result
        self._on_listening = on_listening
        self._router = router
        self._methods: Mapping[str, Method] = {**methods, RECEIPT_MODEL: self._receipt_model}
        self._prefix = start.prefix
        self._state: RouterState | None = None
        self._encoder = OutputEncoder()
        self._received_at_s = time.monotonic()
        self._calls: dict[int, tuple[AsyncGenerator[Any, None], asyncio.Task[None] | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._compiling: dict[str, int] = {}  # counted choices of requests with a grammar, by id
        self._channel = Channel(connected, self._receive, self._lose)
        self._report_loss = on_lost
        self._send = self._channel.send
        self._send("start", start)

    def show(self, state: RouterState) -> None:
        """Send the state of the Router, unless the front end has it."""
        if state != self._state:
            self._state = state
            if state.is_draining:
                self.num_streams = None
            self._send("state", state)

    def deliver(self, step: Delivery, newly_scheduled: Sequence[str]) -> None:
        """See StreamSink."""
        self._send("step", self._encoder.encode(step), newly_scheduled)

    def close_stream(self, unique_id: str) -> None:
        """See StreamSink."""
        self._encoder.close(unique_id)

    def expire(self, unique_ids: Sequence[str]) -> None:
        """See StreamSink."""
        self._send("expired", unique_ids)

    def fail(self, error: SpecdecError) -> None:
        """See StreamSink."""
        self._send("failed", error)

    def abort(self, order: AbortOrder) -> None:
        """End the requests that an order applies to."""
        self._send("abort", order)

    def stop(self) -> None:
        """Have the front end end: it waits for its last answers."""
        self._send("stop")

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of the front end."""
        return time.monotonic() - self._received_at_s

    def _receive(self, message: Message) -> None:
        self._received_at_s = time.monotonic()
        kind, *arguments = message
        getattr(self, f"_on_{kind}")(*arguments)

    def _on_submit(
        self, number: int, request: EngineRequest, caller: Caller, is_silent: bool
    ) -> None:
        if request.params.n == 1 and not request.detokenize:
            self._encoder.open(request.request_id, number)
        if request.params.structured_output is None:
            self._submit(request, is_silent)
        else:
            num_counted = request.is_counted * request.params.n
            self._compiling[request.request_id] = num_counted  # now: a withdrawal may follow
            self._run(self._compile(request, caller, is_silent))

    async def _compile(self, request: EngineRequest, caller: Caller, is_silent: bool) -> None:
        """Submit a request with its grammar, which only this process can use."""
        unique_id, params = request.request_id, request.params
        if unique_id not in self._compiling:
            return  # it was withdrawn
        try:
            self._router.running_engine().thread.require_admission(params.n)
            grammar = await self._router.text.compile(params.structured_output, caller, params.n)
        except Exception as error:
            self._settle(unique_id, error)
        else:
            if unique_id in self._compiling:
                self._submit(replace(request, grammar=grammar), is_silent)
        finally:
            self._compiling.pop(unique_id, None)

    def _submit(self, request: EngineRequest, is_silent: bool) -> None:
        unique_id = request.request_id
        try:
            thread = self._router.running_engine().thread
        except SpecdecError as error:
            self._settle(unique_id, error)
            return
        thread.submit(
            request,
            self,
            lambda error: self._settle(unique_id, error, is_silent=is_silent),
        )

    def _settle(self, unique_id: str, error: Exception | None, *, is_silent: bool = False) -> None:
        if error is not None:
            self._encoder.close(unique_id)
        if error is not None or not is_silent:
            self._send("settled", unique_id, error)

    def _on_withdraw(self, unique_id: str) -> None:
        if (num_counted := self._compiling.pop(unique_id, None)) is not None:
            self._router.metrics.num_refused += num_counted  # received: the front end has its end
            self._encoder.close(unique_id)
        with suppress(NotReadyError):
            self._router.running_engine().thread.withdraw(unique_id)

    async def _receipt_model(self, _argument: None) -> AsyncGenerator[ReceiptModel, None]:
        yield await self._router.receipt_model()

    def _on_sample(self, *sample: Any) -> None:
        self._router.add_sample(*sample)

    def _on_counts(self, counts: Counts, num_streams: int) -> None:
        self.num_streams = num_streams
        self._router.metrics.set_part(self._prefix, counts)

    def _on_call(self, call: int, method: str, argument: Any) -> None:
        self._calls[call] = self._methods[method](argument), None

    def _on_next(self, call: int) -> None:
        if call in self._calls:
            results, _ = self._calls[call]
            self._calls[call] = results, self._run(self._advance(call, results))

    async def _advance(self, call: int, results: AsyncGenerator[Any, None]) -> None:
        try:
            result = await anext(results)
        except StopAsyncIteration:
            self._calls.pop(call, None)
            self._send("ended", call, None)
        except Exception as error:
            if not isinstance(error, SpecdecError):
                logger.exception("a call of a front end failed")
                error = RuntimeError(INTERNAL_FAULT)
            self._calls.pop(call, None)
            self._send("ended", call, error)
        else:
            self._on_result()
            self._send("item", call, result)

    def _on_cancel(self, call: int) -> None:
        results, step = self._calls.pop(call, (None, None))
        if results is not None:
            self._run(_close(results, step))

    def _run(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _lose(self) -> None:
        """End what the front end has asked for; its counts remain."""
        self._compiling.clear()
        with suppress(NotReadyError):  # no request has reached an engine
            self._router.running_engine().thread.withdraw_all(self)
        for call in tuple(self._calls):
            self._on_cancel(call)
        self._router.metrics.end_part(self._prefix)
        self._report_loss()


async def _close(results: AsyncGenerator[Any, None], step: asyncio.Task[None] | None) -> None:
    if step is not None:
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
    await results.aclose()
