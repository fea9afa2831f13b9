"""Client of an engine in this process or another: the streams of its requests, and their texts."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable

from specdec.config.engine import EngineConfig
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.engine.requests.output_streams import OutputStream, OutputStreams
from specdec.engine.requests.preparations import Preparation
from specdec.sequences.sequence import EngineRequest
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.types.deadline import Deadline
from specdec.types.errors import NotReadyError
from specdec.types.request import Caller
from specdec.types.responses import EngineOutput, FinishReason

_MANY_TOKENS = 1024
"""The text of more tokens takes over a millisecond."""


class EngineClient(ABC):
    """Opens streams on one event loop; a subclass sends their requests to the engine.

    is_draining: new requests are rejected because the service stops.
    """

    is_draining = False

    def __init__(
        self, config: EngineConfig, get_tokenizer: Callable[[], Tokenizer], prefix: str = ""
    ) -> None:
        """get_tokenizer: called with the first request.

        prefix: of the serial numbers of the streams, where an engine has several clients.
        """
        self.config = config
        self._get_tokenizer = get_tokenizer
        self._streams = OutputStreams(prefix)

    @abstractmethod
    def _add(self, request: EngineRequest, *, is_silent: bool) -> asyncio.Future[None]:
        """Send a request to the engine. The future raises what `Engine.add` raises.

        is_silent: only an error completes the future; otherwise the first output does.
        """

    @abstractmethod
    def _drop(self, unique_id: str) -> None:
        """Have the engine end a request, if it has it."""

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
        preparation: Preparation | None = None,
        deadline: Deadline | None = None,
        *,
        on_admitted: Callable[[], None] | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Stream a request's outputs, one per step and choice, or fewer for a reader that is late.

        Texts are made when an output is read, so a late reader's are made together. Leaving early
        aborts the request. Its id need not be unique; the outputs have another.
        Raises what `Engine.add` raises, AbortedError, the error of a failed output,
        TargetFailedError when the engine is lost, NotReadyError while draining, `deadline.error`.
        preparation: of the request, if it had one. on_admitted: called when the engine has accepted
        it.
        """
        preparation = preparation or Preparation(request.request_id)
        self._admit(request, metrics, preparation)
        admission: asyncio.Future[None] | None = None
        text = None if request.params.stop else OutputDetokenizer(request, self._get_tokenizer())
        finished, stream = False, self._open(request, metrics, preparation, deadline)
        try:
            own = request.for_stream(stream.unique_id, is_counted=metrics is not None)
            admission = self._add(own, is_silent=on_admitted is None)
            await stream.wait_for(admission)
            if on_admitted is not None:
                on_admitted()
            while not finished:
                output = await stream.take()
                finished = output.is_last
                yield output if text is None else await text.completed(output)
        finally:
            self._streams.close(stream)
            if not finished:
                self._drop(stream.unique_id)
                if metrics is not None:
                    _record_end(metrics, request.params.n, admission)

    def _admit(
        self, request: EngineRequest, metrics: RequestMetrics | None, preparation: Preparation
    ) -> None:
        try:
            preparation.require_alive()
            self.require_admission(request.params.n)
        except Exception as error:
            if metrics is not None:
                metrics.on_refused(error, request.params.n)
            raise
        if metrics is not None:
            metrics.on_resumed(len(request.resume_token_ids))

    def _open(
        self,
        request: EngineRequest,
        metrics: RequestMetrics | None,
        preparation: Preparation,
        deadline: Deadline | None,
    ) -> OutputStream:
        """Open a stream, which receives the request's aborts from now on."""
        num_choices, caller = request.params.n, preparation.caller
        stream = self._streams.open(request.request_id, num_choices, metrics, caller, deadline)
        preparation.end()
        return stream

    def require_admission(self, num_choices: int) -> None:
        """Raise what `generate` raises where a request of `num_choices` would be refused now."""
        if self.is_draining:
            raise NotReadyError("the service is draining; send the request again")
        self.require_room(num_choices)

    def require_room(self, num_choices: int = 1) -> None:
        """Raise OverloadedError if `num_choices` more do not fit; see `EngineConfig.require_room`.

        Does not block. Called before a request is encoded; `generate` checks again.
        """
        self.config.require_room(self.num_sequences, num_choices)

    def abort(self, request_id: str) -> None:
        """End the requests with this id, which then raise AbortedError."""
        self.abort_where(lambda each, caller: each == request_id)

    def abort_where(self, is_ended: Callable[[str, Caller], bool]) -> None:
        """End requests likewise. is_ended: of a request's id and its caller."""
        self._streams.abort(is_ended)


def _record_end(
    metrics: RequestMetrics, num_choices: int, admission: asyncio.Future[None] | None
) -> None:
    """Record the error in flight. admission: of the request; None if it could not be sent."""
    error = sys.exception()
    is_over = admission is not None and admission.done() and not admission.cancelled()
    if error and (admission is None or (is_over and admission.exception() is error)):
        metrics.on_refused(error, num_choices)
    else:
        metrics.on_broken_off(error)


class OutputDetokenizer:
    """Makes the text of the choices of a request without stop strings.

    The engine makes that of the others, since a stop string ends a sequence in the step that
    completes it.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        assert not request.params.stop, "the engine makes the text"
        self._request = request
        self._tokenizer = tokenizer
        self._includes_end = request.params.include_stop_str_in_output
        self._texts: dict[int, IncrementalDetokenizer] = {}  # by choice

    async def completed(self, output: EngineOutput) -> EngineOutput:
        """Return an output with its text, made on another thread if it is long; see `complete`."""
        if len(output.token_ids) <= _MANY_TOKENS:
            return self.complete(output)
        return await asyncio.to_thread(self.complete, output)

    def complete(self, output: EngineOutput) -> EngineOutput:
        """Return an output with its text. Each choice's outputs come in order, each once."""
        text = self._texts.get(output.choice) or self._begin(output.choice)
        token_ids = output.token_ids
        if output.finish_reason is None:
            return output.with_text(text.decode(token_ids), text.lengths)
        if output.finish_reason is FinishReason.STOP and not self._includes_end:
            text.extend(token_ids[:-1])  # the last one ends the text
            text.skip()
        else:
            text.extend(token_ids)
        return output.with_text(text.flush(), text.lengths)

    def _begin(self, choice: int) -> IncrementalDetokenizer:
        request = self._request
        text = IncrementalDetokenizer.of(self._tokenizer, request.params, request.prompt_token_ids)
        if request.resume_token_ids:
            text.decode(request.resume_token_ids)
        self._texts[choice] = text
        return text
