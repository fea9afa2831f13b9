"""The open requests of other processes, whose streams are read there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.engine.requests.outputs import Delivery
from specdec.types.errors import SpecdecError
from specdec.types.responses import EngineOutput


@dataclass
class _Part:
    """The outputs of a step for one process, while they are collected; see `Delivery`."""

    outputs: list[EngineOutput] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def delivery(self) -> Delivery:
        return Delivery(self.outputs, self.request_ids, self.token_ids)


class StreamSink(Protocol):
    """A process that reads streams. Its methods do not block, and run on the engine's thread.

    `fail` is also called by the thread that stops the engine.
    """

    def deliver(self, step: Delivery, newly_scheduled: Sequence[str]) -> None:
        """Receive the outputs of a step, and the ids of its requests that have left the queue."""

    def close_stream(self, unique_id: str) -> None:
        """Forget a request that has ended or was withdrawn."""

    def expire(self, unique_ids: Sequence[str]) -> None:
        """Receive the ids of requests that were queued past their deadline."""

    def fail(self, error: SpecdecError) -> None:
        """End all streams with an error."""


class RemoteStreams:
    """Distributes the outputs of an engine to the processes that read them. On its thread.

    num_sequences: choices that have not ended; any thread may read it.
    """

    def __init__(self) -> None:
        self.num_sequences = 0
        self._sinks: dict[str, StreamSink] = {}
        self._num_choices: dict[str, int] = {}  # that have not ended

    def __len__(self) -> int:
        return len(self._sinks)

    def open(self, unique_id: str, num_choices: int, sink: StreamSink) -> None:
        """Begin to send the outputs of a request to a process."""
        self._sinks[unique_id] = sink
        self._num_choices[unique_id] = num_choices
        self.num_sequences += num_choices

    def close(self, unique_id: str) -> None:
        """Forget a request; an unknown one is ignored."""
        sink = self._sinks.pop(unique_id, None)
        if sink is not None:
            sink.close_stream(unique_id)
        self.num_sequences -= self._num_choices.pop(unique_id, 0)

    def of(self, sink: StreamSink) -> list[str]:
        """Return the ids of the open requests of a process."""
        return [unique_id for unique_id, each in self._sinks.items() if each is sink]

    def deliver(
        self, step: Delivery, newly_scheduled: tuple[str, ...]
    ) -> tuple[Delivery, tuple[str, ...]]:
        """Send the outputs of a step to their processes; return what belongs to none of them."""
        if not self._sinks:
            return step, newly_scheduled
        sent, begun = self._divided(step), self._by_sink(newly_scheduled)
        for sink in {**sent, **begun}:
            if sink is not None:
                sink.deliver(sent[sink].delivery(), begun[sink])
        for each in step.outputs:
            if each.finish_reason is not None or each.error is not None:
                self._end(each)
        return sent[None].delivery(), tuple(begun[None])

    def _divided(self, step: Delivery) -> defaultdict[StreamSink | None, _Part]:
        """Return the parts of the outputs of a step by process."""
        sent = defaultdict[StreamSink | None, _Part](_Part)
        sink_of = self._sinks.get
        for each in step.outputs:
            sent[sink_of(each.request_id)].outputs.append(each)
        for request_id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            part = sent[sink_of(request_id)]
            part.request_ids.append(request_id)
            part.token_ids.append(token_id)
        return sent

    def expire(self, unique_ids: list[str]) -> list[str]:
        """Inform the processes of requests that were dropped; return those of none of them."""
        by_sink = self._by_sink(unique_ids)
        for sink, expired in by_sink.items():
            if sink is not None:
                sink.expire(expired)
        for each in unique_ids:
            self.close(each)
        return by_sink[None]

    def fail(self, error: SpecdecError) -> list[str]:
        """End the streams of all processes with an error; return the ids of their requests."""
        unique_ids = [*self._sinks]
        for sink in {*self._sinks.values()}:
            sink.fail(error)
        for each in unique_ids:
            self.close(each)
        return unique_ids

    def _by_sink(self, unique_ids: Sequence[str]) -> defaultdict[StreamSink | None, list[str]]:
        found = defaultdict[StreamSink | None, list[str]](list)
        for each in unique_ids:
            found[self._sinks.get(each)].append(each)
        return found

    def _end(self, output: EngineOutput) -> None:
        """Record that a choice has ended, or that its request has failed."""
        unique_id = output.request_id
        if unique_id not in self._sinks:
            return
        if output.is_last or output.error is not None:
            self.close(unique_id)
        else:
            self._num_choices[unique_id] -= 1
            self.num_sequences -= 1
