"""One choice of a plain completion, whole or as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.api.openai.completion_schema import CompletionChoice, CompletionRequest
from cluster.api.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    TokenNames,
    joined,
    prompt_logprobs,
)
from specdec.types.messages import Logprobs
from specdec.types.outputs import RequestOutput
from specdec.types.responses import FinishReason


@dataclass
class Echo:
    """The prompt of some choices, which is told before them where that is asked for.

    text: empty where it is not. logprobs: of its tokens from the second on; they come once, with
    what is said first of all choices.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: Logprobs | None = None

    def note(self, output: RequestOutput) -> None:
        """Takes the log-probabilities of the prompt, where an output brings them."""
        if output.prompt_logprobs is not None:
            self.logprobs = output.prompt_logprobs


class CompletionWriter:
    """Takes the outputs of one choice, and tells them in either way; use one of the two.

    Where the prompt is echoed, the first that is told has it before its text, and before its
    log-probabilities those of the prompt's tokens, of which the first has none.
    """

    def __init__(
        self,
        index: int,
        names: TokenNames | None,
        echo: Echo,
        request: CompletionRequest,
    ) -> None:
        """`names`: None without log-probabilities. `echo`: shared by the choices of a prompt."""
        self._index = index
        self._names = names
        self._echo = echo
        self._request = request
        self._has_begun = False
        self._logprobs = None if names is None else CompletionLogprobsWriter(names)
        self._outputs: list[RequestOutput] = []

    def chunk(self, output: RequestOutput) -> CompletionChoice | None:
        """What an output adds; None where it is nothing that shows yet."""
        is_first, self._has_begun = not self._has_begun, True
        self._echo.note(output)
        is_hidden = self._request.max_tokens == 0
        told = self._told_logprobs(output, is_first=is_first)
        choice = CompletionChoice(
            index=self._index,
            text=(self._echo.text if is_first else "") + ("" if is_hidden else output.text),
            logprobs=told,
            finish_reason=self._finish_reason(output),
        )
        if output.finish_reason is not None:
            choice.stop_reason = None if is_hidden else output.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = [] if is_hidden else list(output.token_ids)
            if is_first:
                choice.prompt_token_ids = list(self._echo.token_ids)
        self._add_prompt_logprobs(choice, output)
        shows = choice.text or told or choice.finish_reason or is_first or choice.token_ids
        return choice if shows else None

    def add(self, output: RequestOutput) -> None:
        """Keeps an output for `choice`, which spells it: that may take long."""
        self._echo.note(output)
        self._outputs.append(output)

    def choice(self) -> CompletionChoice:
        """The whole choice, of the outputs that were added."""
        told = [self.chunk(output) for output in self._outputs]
        chunks = [each for each in told if each is not None]
        first, last = chunks[0], chunks[-1]
        parts = [each.logprobs for each in chunks if each.logprobs is not None]
        whole = CompletionChoice(
            index=self._index,
            text="".join(each.text for each in chunks),
            logprobs=joined(parts) if parts else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )
        if self._request.return_token_ids:
            whole.token_ids = [token for each in chunks for token in each.token_ids]
            whole.prompt_token_ids = first.prompt_token_ids
        if first.prompt_logprobs is not None:
            whole.prompt_logprobs = first.prompt_logprobs
        return whole

    def _told_logprobs(self, output: RequestOutput, *, is_first: bool) -> CompletionLogprobs | None:
        if self._logprobs is None or self._request.logprobs is None:
            return None
        parts: list[CompletionLogprobs] = []
        if is_first and self._request.echo:
            parts += self._echoed_logprobs(self._logprobs, self._request.logprobs)
        if output.logprobs is not None and self._request.max_tokens != 0:
            parts.append(self._logprobs.write(output.logprobs))
        return joined(parts)

    def _echoed_logprobs(
        self, writer: CompletionLogprobsWriter, num_best: int
    ) -> list[CompletionLogprobs]:
        first, told = writer.skip(self._echo.token_ids[:1]), self._echo.logprobs
        return [first] if told is None else [first, writer.write(told.best(num_best))]

    def _add_prompt_logprobs(self, choice: CompletionChoice, output: RequestOutput) -> None:
        told, names, num_best = output.prompt_logprobs, self._names, self._request.prompt_logprobs
        if told is not None and names is not None and num_best is not None:
            choice.prompt_logprobs = prompt_logprobs(told.best(num_best), names)

    def _finish_reason(self, output: RequestOutput) -> Literal["stop", "length"] | None:
        if output.finish_reason is None:
            return None
        if self._request.max_tokens == 0:
            return "length"
        return "stop" if output.finish_reason is FinishReason.STOP else "length"
