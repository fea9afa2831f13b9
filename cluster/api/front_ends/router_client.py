"""A front end's end of its Router: the Router as its interfaces see it, and calls of the Router."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from cluster.api.front_ends.channel import Channel, Message
from cluster.api.front_ends.messages import RECEIPT_MODEL, RouterState, Start
from cluster.api.front_ends.outputs import EncodedStep
from cluster.api.front_ends.remote_engine import RemoteEngine
from cluster.replica.instrumentation import Instrumentation
from cluster.replica.orders import AbortOrder
from cluster.replica.receipts import FutureModel
from cluster.replica.router import Router
from cluster.replica.sample_buffer import SampleBuffer
from specdec.engine.metrics.metrics import Metrics
from specdec.types.errors import NotReadyError, TargetFailedError
from specdec.types.reports.receipts import ReceiptModel
from specdec.types.request import Caller
from specdec.types.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec.engine.lifecycle import RunningEngine


class RouterClient:
    """The channel to the Router. Its messages may come before `engine` is set.

    started: the first message. changed: set with each new state. stopped: set when the front end is
    to end.
    """

    def __init__(self, connected: socket.socket, on_lost: Callable[[], None]) -> None:
        """on_lost: called once the Router has ended."""
        self.started: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self.stopped = asyncio.Event()
        self.state = RouterState()
        self.changed = asyncio.Event()
        self.router: FrontEndRouter | None = None
        self.engine: RemoteEngine | None = None
        self._calls = itertools.count()
        self._results: dict[int, asyncio.Queue[Message]] = {}
        self._channel = Channel(connected, self._receive, on_lost)
        self.send = self._channel.send

    async def call(self, method: str, argument: Any) -> AsyncGenerator[Any, None]:
        """Yield the results of a method of the Router; closing the generator cancels it."""
        call, results = next(self._calls), asyncio.Queue[Message]()
        self._results[call] = results
        self.send("call", call, method, argument)
        has_ended = False
        try:
            while True:
                self.send("next", call)
                kind, value = await results.get()
                if kind == "ended":
                    has_ended = True
                    if value is not None:
                        raise value
                    return
                yield value
        finally:
            del self._results[call]
            if not has_ended:
                self.send("cancel", call)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _receive(self, message: Message) -> None:
        kind, *arguments = message
        getattr(self, f"_on_{kind}")(*arguments)

    def _on_start(self, start: Start) -> None:
        self.started.set_result(start)

    def _on_state(self, state: RouterState) -> None:
        self.state = state
        self.changed.set()
        if self.engine is not None:
            self.engine.is_draining = state.is_draining

    def _on_step(self, step: EncodedStep, newly_scheduled: Sequence[str]) -> None:
        assert self.engine is not None, "tokens of no request"
        self.engine.deliver(step, newly_scheduled)

    def _on_settled(self, unique_id: str, error: Exception | None) -> None:
        assert self.engine is not None
        self.engine.settle(unique_id, error)

    def _on_expired(self, unique_ids: list[str]) -> None:
        assert self.engine is not None
        self.engine.expire(unique_ids)

    def _on_failed(self, error: Any) -> None:
        if self.engine is not None:
            self.engine.fail(error)

    def _on_abort(self, order: AbortOrder) -> None:
        if self.router is not None:
            self.router.abort(order)

    def _on_item(self, call: int, value: Any) -> None:
        if call in self._results:
            self._results[call].put_nowait(("item", value))

    def _on_ended(self, call: int, error: Exception | None) -> None:
        if call in self._results:
            self._results[call].put_nowait(("ended", error))

    def _on_stop(self) -> None:
        self.stopped.set()


class FrontEndRouter(Router):
    """The Router in a front end: its engine is in the process of the Router."""

    def __init__(
        self, start: Start, client: RouterClient, shared_load: Callable[[], int] = lambda: 0
    ) -> None:
        """shared_load: see RemoteEngine."""
        routed, metrics = start.routed, Metrics()
        config, self._link = routed.config, client
        super().__init__(
            routed,
            metrics,
            Instrumentation(config, routed.replica, metrics),
            _Samples(config.training_buffer_tokens, config.training_cache_salt or "", client.send),
        )
        client.engine = self._engine = RemoteEngine(
            routed.engine, start.prefix, client.send, lambda: self.text.tokenizer, shared_load
        )
        self._engine.is_draining = client.state.is_draining
        client.router = self

    @property
    def num_streams(self) -> int:
        """Open streams, with those whose last output has not been read."""
        return self._engine.num_open

    def running_engine(self) -> RunningEngine:
        """See Router."""
        raise AssertionError("what needs the engine was not relayed")

    @property
    def failure(self) -> TargetFailedError | None:
        """See Router."""
        return self._link.state.failure

    @property
    def why_not_ready(self) -> str:
        """See Router."""
        return self._link.state.why_not_ready

    def _client(self) -> RemoteEngine:
        if not self._link.state.has_engine:
            raise NotReadyError("the model is still loading")
        return self._engine

    def close(self) -> None:
        """Send the remaining traces, which may take seconds."""
        self._instrumentation.close()

    @property
    def adapter_ids(self) -> Mapping[str, int]:
        """See Router."""
        return self._link.state.adapter_ids

    def _describe_model(self) -> FutureModel:
        async def ask() -> ReceiptModel:
            async with aclosing(self._link.call(RECEIPT_MODEL, None)) as results:
                model: ReceiptModel = await anext(results)
                return model

        task = asyncio.ensure_future(ask())
        # Read the error: asyncio logs one that is not read, and the Router has logged it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _compile(self, params: SamplingParams, caller: Caller) -> None:
        """Leave a grammar to the Router: a compiled one cannot be sent to another process."""


class _Samples(SampleBuffer):
    """Sends samples to the Router."""

    def __init__(self, max_tokens: int, cache_salt: str, send: Callable[..., None]) -> None:
        super().__init__(max_tokens, cache_salt, "")
        self._send = send

    def add(self, *sample: Any) -> None:
        """See SampleBuffer."""
        self._send("sample", *sample)
