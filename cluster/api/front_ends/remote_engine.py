"""The engine as a front end sees it: requests go to the Router, and tokens come back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from cluster.api.front_ends.outputs import (
    EncodedStep,
    MoreTokens,
    decodes_of,
    following,
    rows_of,
)
from cluster.observability.request_context import current_caller
from specdec.config.engine import EngineConfig
from specdec.engine.requests.engine_client import EngineClient
from specdec.engine.requests.outputs import Delivery
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import SpecdecError
from specdec.types.responses import EngineOutput


class RemoteEngine(EngineClient):
    """Streams whose requests are run by the engine of another process."""

    def __init__(
        self,
        config: EngineConfig,
        prefix: str,
        send: Callable[..., None],
        get_tokenizer: Callable[[], Tokenizer],
        shared_load: Callable[[], int],
    ) -> None:
        """send: a message to the Router. get_tokenizer: see EngineClient.

        shared_load: returns the choices of all front ends that have not ended.
        """
        super().__init__(config, get_tokenizer, prefix)
        self._send = send
        self._shared_load = shared_load
        self._numbers = itertools.count()
        self._by_id: dict[str, _RemoteRequest] = {}
        self._by_number: dict[int, _RemoteRequest] = {}

    @property
    def num_sequences(self) -> int:
        """Choices that have not ended, as far as this process knows; the engine checks again."""
        return max(super().num_sequences, self._shared_load())

    @property
    def num_open(self) -> int:
        """Open streams, with those whose last output has not been read."""
        return self._streams.num_open

    def _add(self, request: EngineRequest, *, is_silent: bool) -> asyncio.Future[None]:
        unique_id, number = request.request_id, next(self._numbers)
        remote = _RemoteRequest(unique_id, number)
        self._by_id[unique_id] = self._by_number[number] = remote
        self._send("submit", number, request, current_caller.get(), is_silent)
        return remote.settled

    def _drop(self, unique_id: str) -> None:
        if self._forget(unique_id):
            self._send("withdraw", unique_id)

    def _forget(self, unique_id: str) -> bool:
        """Forget a request; return whether it was known."""
        remote = self._by_id.pop(unique_id, None)
        if remote is not None:
            del self._by_number[remote.number]
        return remote is not None

    def settle(self, unique_id: str, error: Exception | None) -> None:
        """Receive whether a request was accepted."""
        remote = self._by_id.get(unique_id)
        if remote is None or remote.settled.done():
            return  # its client has left
        if error is None:
            remote.settled.set_result(None)
        else:
            self._forget(unique_id)
            remote.settled.set_exception(error)

    def deliver(self, step: EncodedStep, newly_scheduled: Sequence[str]) -> None:
        """Receive the outputs of a step. Requests that are unknown have lost their client."""
        outputs = [
            remote.following(row, token_ids)
            for row, token_ids in rows_of(step)
            if (remote := self._by_number.get(row.number)) is not None
        ]
        outputs += [self._whole(EngineOutput._make(fields)) for fields in step.whole]
        request_ids, tokens = list[str](), list[int]()
        for number, token_id in decodes_of(step):
            if (remote := self._by_number.get(number)) is not None:
                request_ids.append(remote.unique_id)
                tokens.append(token_id)
        self._streams.deliver(Delivery(outputs, request_ids, tokens), tuple(newly_scheduled))

    def _whole(self, output: EngineOutput) -> EngineOutput:
        remote = self._by_id.get(output.request_id)
        if remote is None:
            return output  # its client has left
        if output.is_last or output.error is not None:
            self._forget(output.request_id)
        return output if output.error is not None else remote.whole(output)

    def expire(self, unique_ids: list[str]) -> None:
        """Receive the ids of requests that were queued past their deadline."""
        self._streams.expire(unique_ids)

    def fail(self, error: SpecdecError) -> None:
        """End all streams with an error."""
        for unique_id in tuple(self._by_id):
            self.settle(unique_id, error)
        self._streams.fail(error)


class _RemoteRequest:
    """A request that the engine has. settled: whether the engine has accepted it."""

    def __init__(self, unique_id: str, number: int) -> None:
        self.unique_id, self.number = unique_id, number
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: EngineOutput | None = None

    def following(self, row: MoreTokens, token_ids: tuple[int, ...]) -> EngineOutput:
        """Return the output of further tokens, after another output."""
        assert self._last is not None, "further tokens without first ones"
        self._last = following(self._last, row, token_ids)
        return self._last

    def whole(self, output: EngineOutput) -> EngineOutput:
        """Return an output that has come whole; others may follow it."""
        self._last = output
        return output
