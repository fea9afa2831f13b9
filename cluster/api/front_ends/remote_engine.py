"""The engine as a front end sees it: requests go to the Router, and tokens come back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.api.front_ends.outputs import MoreTokens, StepOutputs, decode, following
from cluster.observability.request_context import current_caller
from specdec.config.engine import EngineConfig
from specdec.engine.requests.engine_client import EngineClient
from specdec.sequences.sequence import EngineRequest
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import SpecdecError
from specdec.types.responses import EngineOutput, FinishReason


class RemoteEngine(EngineClient):
    """Streams whose requests are run by the engine of another process.

    The text of a request without stop strings is made here; a stop string ends the sequence in the
    step that completes it, so the engine has the text of such a request.
    """

    def __init__(
        self,
        config: EngineConfig,
        prefix: str,
        send: Callable[..., None],
        get_tokenizer: Callable[[], Tokenizer],
        shared_load: Callable[[], int],
    ) -> None:
        """send: a message to the Router. get_tokenizer: called once requests come.

        shared_load: returns the choices of all front ends that have not ended.
        """
        super().__init__(config, prefix)
        self._send = send
        self._get_tokenizer = get_tokenizer
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

    async def _add(self, request: EngineRequest, *, is_admitted: bool) -> None:
        unique_id, number = request.request_id, next(self._numbers)
        if not request.params.stop:
            request = replace(request, detokenize=False)
        remote = _RemoteRequest(number, request, self._get_tokenizer())
        self._by_id[unique_id] = self._by_number[number] = remote
        self._send("submit", number, request, current_caller.get(), is_admitted)
        await remote.settled

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

    def deliver(self, step: StepOutputs, newly_scheduled: Sequence[str]) -> None:
        """Receive the outputs of a step."""
        outputs = []
        for row, token_ids in decode(step):
            remote = self._by_number.get(row.number)
            if remote is not None:  # otherwise its client has left
                outputs.append(remote.following(row, token_ids))
        outputs += [self._whole(EngineOutput._make(fields)) for fields in step[2]]
        self._streams.deliver(outputs, tuple(newly_scheduled))

    def _whole(self, output: EngineOutput) -> EngineOutput:
        remote = self._by_id.get(output.request_id)
        if remote is None:
            return output  # its client has left
        if output.is_last or output.error is not None:
            self._forget(output.request_id)
        return output if output.error is not None else remote.complete(output)

    def expire(self, unique_ids: list[str]) -> None:
        """Receive the ids of requests that were queued past their deadline."""
        self._streams.expire(unique_ids)

    def fail(self, error: SpecdecError) -> None:
        """End all streams with an error."""
        for unique_id in tuple(self._by_id):
            self.settle(unique_id, error)
        self._streams.fail(error)


class _RemoteRequest:
    """A request that the engine has, and the texts of its choices unless the engine makes them.

    settled: whether the engine has accepted it.
    """

    def __init__(self, number: int, request: EngineRequest, tokenizer: Tokenizer) -> None:
        self.number = number
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._tokenizer = tokenizer
        self._includes_end = request.params.include_stop_str_in_output
        self._texts: dict[int, IncrementalDetokenizer] = {}  # by choice
        self._last: EngineOutput | None = None

    def following(self, row: MoreTokens, token_ids: tuple[int, ...]) -> EngineOutput:
        """Return the output of further tokens, after another output."""
        assert self._last is not None, "further tokens without first ones"
        text = self._texts[0]
        text.extend(token_ids)
        self._last = following(self._last, row, token_ids, text.take(), text.lengths)
        return self._last

    def complete(self, output: EngineOutput) -> EngineOutput:
        """Return an output with its text."""
        if not self._request.detokenize:
            output = self._with_text(output)
        self._last = output
        return output

    def _with_text(self, output: EngineOutput) -> EngineOutput:
        text = self._texts.get(output.choice) or self._begin(output.choice)
        if output.finish_reason is None:
            text.extend(output.token_ids)
            return output._replace(text=text.take(), text_lengths=text.lengths)
        if output.finish_reason is FinishReason.STOP and not self._includes_end:
            text.extend(output.token_ids[:-1])  # the last one ends the text
            text.skip()
        else:
            text.extend(output.token_ids)
        return output._replace(text=text.flush(), text_lengths=text.lengths)

    def _begin(self, choice: int) -> IncrementalDetokenizer:
        request = self._request
        prompt = request.prompt_token_ids
        text = IncrementalDetokenizer.of(self._tokenizer, request.params, prompt)
        if request.resume_token_ids:
            text.extend(request.resume_token_ids)
            text.take()
        self._texts[choice] = text
        return text
