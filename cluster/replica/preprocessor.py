"""Preprocessing of requests: tokenization, chat templates and grammar compilation.

Requests arrive as text and chats and go to the engine as tokens; no engine step waits for this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from specdec.models.config.model_config import ModelConfig
from specdec.text.chat_template import ChatTemplate, read_template
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.grammar.compiler import COMPILE_TIMEOUT_S, TIMED_OUT, GrammarCompiler
from specdec.text.grammar.matcher import Grammar
from specdec.text.tokenizer import Tokenizer, check_token_ids
from specdec.text.vocab_bytes import TokenBytes
from specdec.types.errors import OverloadedError, as_exception
from specdec.types.request import OWN_PROCESS, Caller, ChatMessage, Conversation, Prompt
from specdec.types.sampling.sampling_params import StructuredOutput

T = TypeVar("T")

MAX_ENCODING = 2
MAX_ENCODING_CHARS = 8_000_000
"""Limit for the prompts of a replica that are encoded or wait for it: the last one waits for some
seconds."""

_MIN_CHARS = 1_000
"""The size of the smallest prompt, for its cost besides its characters."""

_BATCH_CHARS = 2_000
"""Limit for prompts that a thread encodes in one turn: two small ones.

With more, the event loop waits longer for the interpreter lock."""


class _Work(NamedTuple):
    """Work for a thread. size: its characters or tokens. result: of the function, unless done."""

    function: Callable[[], Any]
    context: Context
    size: int
    result: asyncio.Future[Any]

    def run(self) -> _Outcome:
        """Call the function, unless its caller has been cancelled. On a thread."""
        try:
            return _Outcome(None if self.result.done() else self.context.run(self.function))
        except BaseException as error:
            return _Outcome(None, as_exception(error))

    def end(self, outcome: _Outcome) -> None:
        """Return the outcome to the caller. On the event loop."""
        if self.result.done():
            return
        if outcome.error is None:
            self.result.set_result(outcome.value)
        else:
            self.result.set_exception(outcome.error)


class _Outcome(NamedTuple):
    """A function's return value, or its error."""

    value: Any
    error: Exception | None = None


class EncodeLimiter:
    """Runs encoding on a few threads, and limits the characters that are encoded or wait for it.

    A thread takes two small prompts at once, which the engine then receives together. Only the
    event loop gives work to threads, so that they pause while it is late. For one event loop.
    """

    def __init__(
        self, max_running: int = MAX_ENCODING, max_chars: int = MAX_ENCODING_CHARS
    ) -> None:
        self._max_running = max_running
        self._max_chars = max_chars
        self._waiting: dict[asyncio.Future[Any], _Work] = {}  # in order
        self._running: set[asyncio.Task[None]] = set()
        self.num_chars = 0

    async def run(self, function: Callable[[], T], num_chars: int) -> T:
        """Return what a function returns. num_chars: its size in characters or tokens.

        Raises OverloadedError at once beyond the limit; without other work any size is accepted. A
        thread cannot be stopped: work that was started occupies its slot until it is done, even if
        its caller is cancelled.
        """
        size = max(num_chars, _MIN_CHARS)
        if self.num_chars and self.num_chars + size > self._max_chars:
            raise OverloadedError(f"{self.num_chars} characters of prompts wait to be encoded")
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[result] = _Work(function, copy_context(), size, result)
        self.num_chars += size
        if len(self._running) < self._max_running:
            self._running.add(asyncio.create_task(self._run_waiting()))
        try:
            return await result
        finally:
            if self._waiting.pop(result, None):
                self.num_chars -= size

    async def _run_waiting(self) -> None:
        try:
            while self._waiting:
                await self._run_batch(self._take())
        finally:
            self._running.discard(asyncio.current_task())

    async def _run_batch(self, batch: Sequence[_Work]) -> None:
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(None, _run, batch)
        except Exception as error:  # no thread can be started
            outcomes = [_Outcome(None, error)] * len(batch)
        finally:
            self.num_chars -= sum(work.size for work in batch)
        for work, outcome in zip(batch, outcomes, strict=True):
            work.end(outcome)

    def _take(self) -> list[_Work]:
        """Remove the first work, with what follows it if all of that is small."""
        batch, size = list[_Work](), 0
        for work in self._waiting.values():
            size += work.size
            if batch and size > _BATCH_CHARS:
                break
            batch.append(work)
        for work in batch:
            del self._waiting[work.result]
        return batch


def _run(batch: Sequence[_Work]) -> list[_Outcome]:
    return [work.run() for work in batch]


class EncodedChat(NamedTuple):
    """The tokens of a chat, and the beginning of its answer in the prompt."""

    token_ids: tuple[int, ...]
    answer_start: str


class TokenTexts(NamedTuple):
    """The text of some tokens. lengths: its characters that are final with each token."""

    text: str
    lengths: tuple[int, ...]


class Preprocessor:
    """Tokenizer and grammar compiler of a replica, loaded at first use."""

    def __init__(
        self, directory: Path, model: ModelConfig, chat_template: Path | None = None
    ) -> None:
        """directory: of the target model. model: its configuration.

        chat_template: file of a template that replaces the model's.
        """
        self._directory = directory
        self._chat_template = chat_template
        self._model = model
        self._limiter = EncodeLimiter()

    def load(self) -> None:
        """Load the tokenizer and start the grammar compiler, which takes seconds. Thread-safe."""
        self._grammars.wait_until_ready()

    def close(self) -> None:
        """End the processes of the grammar compiler, if it was started."""
        if "_grammars" in self.__dict__:
            self._grammars.close()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer. Raises InvalidValueError for a template that cannot be read."""
        path = self._chat_template
        return Tokenizer(self._directory, None if path is None else read_template(path))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.tokenizer)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template."""
        return self.tokenizer.chat_template

    def is_special(self, text: str) -> bool:
        """Return whether a text is a special token, which is left out of answers."""
        token_id = self.tokenizer.token_id(text)
        return token_id is not None and token_id in self.tokenizer.special_token_ids

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it. Fast, and thread-safe."""
        return self.tokenizer.token_strings(token_ids)

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of a prompt; `add_special_tokens` applies to texts only.

        Runs off the event loop: a text of a million characters takes a second. Raises
        OverloadedError where too many characters are queued.
        """
        if isinstance(prompt, str):
            encode = partial(self.tokenizer.encode, prompt, add_special_tokens)
            return tuple(await self._limiter.run(encode, len(prompt)))
        if isinstance(prompt, Conversation):
            encode = partial(self.tokenizer.encode_conversation, prompt)
        elif isinstance(prompt[0], ChatMessage):
            encode = partial(self.tokenizer.encode_chat, prompt)
        else:
            return prompt
        return tuple(await self._limiter.run(encode, _num_chars(prompt)))

    async def encode_chat(self, chat: Conversation, marks: Sequence[str]) -> EncodedChat:
        """Return the tokens of a chat, and how its answer begins; see `ChatTemplate.answer_start`.

        Runs as `encode` does, and raises its errors.
        """

        def encode() -> EncodedChat:
            prompt = self.tokenizer.render(chat)
            start = self.chat_template.answer_start(chat, prompt.text, marks)
            return EncodedChat(tuple(self.tokenizer.encode_rendered(prompt)), start)

        return await self._limiter.run(encode, _num_chars(chat))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens. Raises InvalidValueError.

        Runs off the event loop, in the same queue as `encode`; raises OverloadedError likewise.
        """
        check_token_ids("token_ids", token_ids, self._model.vocab_size)
        return await self._limiter.run(partial(self.tokenizer.decode, token_ids), len(token_ids))

    async def received(
        self, detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]
    ) -> TokenTexts:
        """Return the text that a client has received with the first tokens of an answer.

        detokenizer: of the answer; the tokens are added to it. The text ends before a possible stop
        string, as in a stream. Runs as `decode` does, and raises its errors.
        """
        check_token_ids("resume_token_ids", token_ids, self._model.vocab_size)

        def decode() -> TokenTexts:
            detokenizer.append_until_stop(token_ids)
            return TokenTexts(detokenizer.take(), detokenizer.lengths)

        return await self._limiter.run(decode, len(token_ids))

    async def token_texts(
        self, token_ids: tuple[int, ...], *, skip_special_tokens: bool
    ) -> TokenTexts:
        """Return the text of token ids. Runs as `decode` does, and raises its errors."""
        check_token_ids("token_ids", token_ids, self._model.vocab_size)

        def decode() -> TokenTexts:
            detokenizer = IncrementalDetokenizer(self.tokenizer, (), skip_special_tokens)
            detokenizer.extend(token_ids)
            return TokenTexts(detokenizer.flush(), detokenizer.lengths)

        return await self._limiter.run(decode, len(token_ids))

    async def compile(
        self, spec: StructuredOutput | None, caller: Caller = OWN_PROCESS, num_sequences: int = 1
    ) -> Grammar | None:
        """Return the compiled grammar for the choices of a request; None where it has none.

        The grammars of different callers are compiled in turn.
        Compiles in another process, which may take more than a second. Raises InvalidValueError for
        what cannot be compiled, and OverloadedError when it takes too long.
        """
        if spec is None:
            return None
        compiled = asyncio.wrap_future(self._grammars.submit(spec, caller, num_sequences))
        compiled.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            done, _ = await asyncio.wait([compiled], timeout=COMPILE_TIMEOUT_S)
            if not done:
                raise OverloadedError(TIMED_OUT)
            return compiled.result()
        finally:
            compiled.cancel()  # where the caller left or it timed out, so that no copy waits for it

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self._model.vocab_size, self._model.eos_token_ids)


def _num_chars(prompt: Conversation | tuple[ChatMessage, ...]) -> int:
    """Count the characters of all texts and field names; any other value counts as one."""
    if isinstance(prompt, Conversation):
        left: list[Any] = [prompt.messages, prompt.tools, prompt.template_kwargs]
    else:
        left = [(each.role, each.content) for each in prompt]
    num_chars = 0
    while left:
        value = left.pop()
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
        else:
            num_chars += 1
    return num_chars
