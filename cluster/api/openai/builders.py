"""Builds the engine's calls from a request, and the response from outputs, complete or streamed."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from cluster.api.base.openai_errors import Failure
from cluster.api.base.openai_schema import (
    PlainBody,
    ResponseModel,
    StreamOptions,
    receipt_bodies,
)
from cluster.api.base.sse import COMMENT, TextEvents, event
from cluster.api.openai.answer_reading import AnswerReading
from cluster.api.openai.logprobs import TokenNames
from cluster.api.openai.parsers.pieces import Content, Reasoning
from cluster.api.openai.request_warnings import RequestWarning
from cluster.api.openai.schemas.sampling_fields import SamplingFields
from cluster.api.openai.streams import DONE, PromptOutput
from cluster.api.openai.usage import UsageMeter
from cluster.replica.router import Router
from specdec.config.engine import MAX_STREAM_INTERVAL
from specdec.engine.requests.input_processor import check_answer_in_one_message
from specdec.types.deadline import Deadline
from specdec.types.errors import InvalidValueError
from specdec.types.request import Conversation, GenerateRequest
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import SEED_LIMIT, SamplingParams

T = TypeVar("T")

TextDelta = Content | Reasoning

MANY_TOKENS = 64
"""With log-probabilities, more tokens than this are worth the switch to a thread."""

_NO_OPTIONS = StreamOptions()


@dataclass(frozen=True)
class RequestContext:
    """The id and the deadline of a request, and the warnings in its response's header."""

    request_id: str
    deadline: Deadline
    warnings: list[RequestWarning] = field(default_factory=list)


@dataclass(frozen=True)
class ResponseInfo:
    """The fields that every response and every chunk repeats."""

    id: str
    model: str
    seed: int
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, id: str, router: Router, params: SamplingParams, model: str | None) -> ResponseInfo:
        """Make the fields for a request whose seed is set. model: as in the request."""
        assert params.seed is not None, "with_seed has set the seed"
        return cls(id, model or router.config.served_model_name, params.seed)


def check_batch_admission(router: Router, model: str, num_prompts: int, num_choices: int) -> None:
    """Check the admission of several prompts together. num_choices: of all of them.

    Raise the errors of `Router.check_admission`; what never fits names the prompts.
    """
    try:
        router.check_admission(model, num_choices)
    except InvalidValueError as error:
        if num_prompts == 1:
            raise
        given = f"{num_prompts} prompts with {num_choices} choices in all"
        raise InvalidValueError("prompt", given, error.limit) from error


async def prompt_token_ids(
    router: Router,
    request: SamplingFields,
    prompt: str | Conversation | Sequence[int],
    *,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """Encode a prompt, truncated to its last tokens if the request asks for that.

    Raise OverloadedError if too many prompts wait to be encoded.
    """
    if isinstance(prompt, str | Conversation):
        prompt = await router.text.encode(prompt, add_special_tokens=add_special_tokens)
    max_tokens = request.truncate_prompt_tokens
    return tuple(prompt if max_tokens is None else prompt[-max_tokens:])


def with_seed(params: SamplingParams, router: Router) -> SamplingParams:
    """Choose a seed unless the request has one."""
    return params if params.seed is not None else params.with_seed(router.new_seed())


def params_for_prompt(params: SamplingParams, index: int, *, is_seed_given: bool) -> SamplingParams:
    """Return the parameters of one of several prompts.

    A seed from the client applies to all prompts. A chosen seed is incremented for each prompt, so
    that equal prompts have different answers: the random numbers are keyed by the seed.
    """
    assert params.seed is not None, "with_seed has set the seed"
    if is_seed_given or index == 0:
        return params
    return params.with_seed((params.seed + index) % SEED_LIMIT)


def generate_call(
    router: Router,
    request: SamplingFields,
    prompt: tuple[int, ...],
    params: SamplingParams,
    request_id: str,
) -> GenerateRequest:
    """Build the call for one prompt; without streaming, all its output comes at once."""
    interval: int | None = MAX_STREAM_INTERVAL
    if request.stream:
        interval = request.stream_interval
    else:
        check_answer_in_one_message(params, router.max_tokens(params))
    return GenerateRequest(
        model=request.model or "",
        prompt=prompt,
        params=params,
        request_id=request_id,
        priority=request.priority,
        stream_interval=interval,
        cache_salt=request.cache_salt or "",
        allow_training=request.allow_training,
        receipt=request.receipt,
        resume_token_ids=tuple(request.resume_token_ids),
    )


def limit_to_context(call: GenerateRequest, max_model_len: int) -> GenerateRequest:
    """Lower `max_tokens` to what the context has left, if that is enough for any answer."""
    assert isinstance(call.prompt, tuple), "the prompt is tokenized"
    room, params = max_model_len - len(call.prompt), call.params
    if params.max_tokens is None or not max(params.min_tokens, 1) <= room < params.max_tokens:
        return call
    return replace(call, params=replace(params, max_tokens=room))


def matched_stop(output: EngineOutput) -> str | int | None:
    """Return what a last output ended with, as in SGLang: also an end-of-sequence token."""
    if output.stop_reason is not None or output.finish_reason is not FinishReason.STOP:
        return output.stop_reason
    return output.token_ids[-1] if output.token_ids else None


def token_names(router: Router, request: SamplingFields) -> TokenNames:
    """Return the names of tokens in log-probabilities."""
    return TokenNames(router.text.token_bytes, request.return_tokens_as_token_ids)


async def offload(work: Callable[[], T], *, is_large: bool) -> T:
    """Run `work`, on a thread if it is large, and return its result."""
    return await asyncio.to_thread(work) if is_large else work()


class ResponseBuilder(ABC):
    """Builder of one response: `add` and `body`; or `opening`, `events`, `closing` for a stream."""

    def __init__(self, calls: Sequence[GenerateRequest], names: TokenNames | None) -> None:
        """Make a builder for the outputs of `calls`; `names` is None without log-probabilities."""
        self.calls = calls
        self.names = names
        self.meter = UsageMeter()
        self.forced_calls: AnswerReading | None = None  # if the answer ends at a repeated one

    def is_large(self, output: EngineOutput) -> bool:
        """Return whether an output has many log-probabilities, to convert on a thread."""
        has_prompt = output.prompt_logprobs is not None
        return self.names is not None and (has_prompt or len(output.token_ids) > MANY_TOKENS)

    @property
    def is_body_large(self) -> bool:
        """Return whether the complete response may have many log-probabilities, likewise."""
        return self.names is not None

    @abstractmethod
    def add(self, each: PromptOutput) -> None:
        """Add an output to the complete response."""

    @abstractmethod
    def body(self) -> ResponseModel | PlainBody:
        """Build the complete response."""

    def to_json(self) -> str | bytes:
        """Encode the complete response."""
        return self.body().to_json()

    @property
    def keep_alive(self) -> bytes:
        """Bytes that a stream sends in a long silence."""
        return COMMENT

    def opening(self) -> list[bytes]:
        """Encode the events before the first output."""
        return []

    @abstractmethod
    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode an output; return [] if it adds nothing visible."""

    @abstractmethod
    def closing(self) -> list[bytes]:
        """Encode the events after the last output."""

    def failed(self, failure: Failure) -> list[bytes]:
        """Encode an error: the status has been sent, and the openai client expects an event."""
        return [event(failure.body.model_dump_json()), DONE]


class ChoiceWriter(ABC):
    """Builder of one choice: `delta` for a stream, `add` and `choice` for a complete answer.

    text_events: encode the chunks that `delta` returns as a text, by its kind.
    """

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.text_events: dict[type[TextDelta], TextEvents] = {}

    def add(self, output: EngineOutput) -> None:
        """Keep an output for `choice`, which converts it and may take long."""
        self.outputs.append(output)

    @abstractmethod
    def delta(self, output: EngineOutput) -> dict[str, Any] | TextDelta | None:
        """Convert an output to the fields of a chunk's choice, None if it adds nothing visible.

        Most chunks add a text and nothing else: it is returned as it is.
        """

    @abstractmethod
    def text_chunk(self, delta: TextDelta) -> dict[str, Any]:
        """Return the fields of the choice in a chunk that adds only a text."""

    @abstractmethod
    def choice(self) -> dict[str, Any]:
        """Return the fields of the complete choice, from the outputs that were added."""


W = TypeVar("W", bound=ChoiceWriter)


class ChoicesBuilder(ResponseBuilder, Generic[W]):
    """Base class of the builders of chats and completions.

    kind, chunk_kind: `object` of the complete response, and of an event of a stream.
    writers: one for each choice, those of the first prompt first.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self,
        request: SamplingFields,
        calls: Sequence[GenerateRequest],
        info: ResponseInfo,
        names: TokenNames | None,
        writers: Sequence[W],
    ) -> None:
        super().__init__(calls, names)
        self.request = request
        options = request.stream_options or _NO_OPTIONS
        self._has_usage = options.has_usage
        self.has_continuous_usage = options.has_usage and options.continuous_usage_stats
        self.info = info
        self.writers = writers

    def usage(self) -> dict[str, Any]:
        """Return the usage so far."""
        return self.meter.usage()

    def body(self) -> PlainBody:
        """Build the complete response."""
        choices = [writer.choice() for writer in self.writers]
        fields = {**self.receipt_fields, **self.prompt_fields}
        return self._plain_body(self.kind, choices, usage=self.usage(), **fields)

    def _plain_body(self, kind: str, choices: Sequence[dict[str, Any]], **fields: Any) -> PlainBody:
        """Build a response or a chunk. fields: those after the choices."""
        info = self.info
        head = {"id": info.id, "object": kind, "created": info.created, "model": info.model}
        return PlainBody({**head, "seed": info.seed, "choices": choices, **fields})

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """The fields of the prompt in the complete response, if it has some beside its choices."""
        return {}

    @property
    def receipt_fields(self) -> dict[str, Any]:
        """The field with the receipts, if requested."""
        return {"receipts": receipt_bodies(self.meter.receipts)} if self.request.receipt else {}

    def add(self, each: PromptOutput) -> None:
        """Add an output to the complete response."""
        self.meter.add(each.prompt, each.output)
        self._writer(each).add(each.output)

    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode an output."""
        self.meter.add(each.prompt, each.output)
        writer = self._writer(each)
        delta = writer.delta(each.output)
        if delta is None:
            return []
        if isinstance(delta, Content | Reasoning):
            if not self.has_continuous_usage:
                return [self._text_events(writer, type(delta)).encode(delta.text)]
            delta = writer.text_chunk(delta)
        return [self.encode_chunk([delta], self.usage() if self.has_continuous_usage else None)]

    def closing(self) -> list[bytes]:
        """Encode receipts and usage, if requested, and the end."""
        if not ((fields := self.receipt_fields) or self._has_usage):
            return [DONE]
        return [self.encode_chunk([], self.usage() if self._has_usage else None, **fields), DONE]

    def encode_chunk(
        self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None, **fields: Any
    ) -> bytes:
        """Encode a chunk with these choices and fields; without usage it is null, or left out."""
        if self._has_usage:
            fields = {"usage": usage, **fields}
        return event(self._plain_body(self.chunk_kind, choices, **fields).to_json().decode())

    def _text_events(self, writer: W, kind: type[TextDelta]) -> TextEvents:
        events = writer.text_events.get(kind)
        if events is None:
            events = writer.text_events[kind] = TextEvents(
                lambda text: self.encode_chunk([writer.text_chunk(kind(text))], None)
            )
        return events

    def _writer(self, each: PromptOutput) -> W:
        return self.writers[each.prompt * self.calls[0].params.n + each.output.choice]
