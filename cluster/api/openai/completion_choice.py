"""One choice of a plain completion, complete or streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.api.openai.completion_schema import CompletionChoice, CompletionRequest
from cluster.api.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    TokenNames,
    concatenate,
    prompt_logprobs,
)
from specdec.types.messages import Logprobs
from specdec.types.outputs import EngineOutput
from specdec.types.responses import FinishReason


@dataclass
class Echo:
    """The prompt of some choices, for `echo`.

    text: empty without `echo`. logprobs: of its tokens from the second on; the first output of the
    prompt has them.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: Logprobs | None = None

    def note(self, output: EngineOutput) -> None:
        """Keep the log-probabilities of the prompt, if the output has them."""
        if output.prompt_logprobs is not None:
            self.logprobs = output.prompt_logprobs


class CompletionWriter:
    """Builder of one choice: `chunk` for a stream, `add` and `choice` for a complete answer.

    With `echo`, the first chunk starts with the prompt, and its log-probabilities with those of the
    prompt's tokens; the first of these is null.
    """

    def __init__(
        self,
        index: int,
        names: TokenNames | None,
        echo: Echo,
        request: CompletionRequest,
    ) -> None:
        """Make a builder; `names` is None without log-probabilities, `echo` that of the prompt."""
        self._index = index
        self._names = names
        self._echo = echo
        self._request = request
        self._has_started = False
        self._logprobs = None if names is None else CompletionLogprobsWriter(names)
        self._outputs: list[EngineOutput] = []

    def chunk(self, output: EngineOutput) -> CompletionChoice | None:
        """Convert an output to a chunk; return None if it adds nothing visible."""
        is_first, self._has_started = not self._has_started, True
        self._echo.note(output)
        is_hidden = self._request.max_tokens == 0
        logprobs = self._chunk_logprobs(output, is_first=is_first)
        choice = CompletionChoice(
            index=self._index,
            text=(self._echo.text if is_first else "") + ("" if is_hidden else output.text),
            logprobs=logprobs,
            finish_reason=self._finish_reason(output),
        )
        if output.finish_reason is not None:
            choice.stop_reason = None if is_hidden else output.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = [] if is_hidden else list(output.token_ids)
            if is_first:
                choice.prompt_token_ids = list(self._echo.token_ids)
        self._add_prompt_logprobs(choice, output)
        is_visible = choice.text or logprobs or choice.finish_reason or is_first or choice.token_ids
        return choice if is_visible else None

    def add(self, output: EngineOutput) -> None:
        """Keep an output for `choice`, which converts it and may take long."""
        self._echo.note(output)
        self._outputs.append(output)

    def choice(self) -> CompletionChoice:
        """Build the complete choice from the outputs that were added."""
        chunks = [each for output in self._outputs if (each := self.chunk(output)) is not None]
        first, last = chunks[0], chunks[-1]
        parts = [each.logprobs for each in chunks if each.logprobs is not None]
        whole = CompletionChoice(
            index=self._index,
            text="".join(each.text for each in chunks),
            logprobs=concatenate(parts) if parts else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )
        if self._request.return_token_ids:
            whole.token_ids = [token for each in chunks for token in each.token_ids]
            whole.prompt_token_ids = first.prompt_token_ids
        if first.prompt_logprobs is not None:
            whole.prompt_logprobs = first.prompt_logprobs
        return whole

    def _chunk_logprobs(self, output: EngineOutput, *, is_first: bool) -> CompletionLogprobs | None:
        if self._logprobs is None or self._request.logprobs is None:
            return None
        parts: list[CompletionLogprobs] = []
        if is_first and self._request.echo:
            parts += self._echoed_logprobs(self._logprobs, self._request.logprobs)
        if output.logprobs is not None and self._request.max_tokens != 0:
            parts.append(self._logprobs.write(output.logprobs))
        return concatenate(parts)

    def _echoed_logprobs(
        self, writer: CompletionLogprobsWriter, num_best: int
    ) -> list[CompletionLogprobs]:
        first, rest = writer.skip(self._echo.token_ids[:1]), self._echo.logprobs
        return [first] if rest is None else [first, writer.write(rest.best(num_best))]

    def _add_prompt_logprobs(self, choice: CompletionChoice, output: EngineOutput) -> None:
        logprobs, num_best = output.prompt_logprobs, self._request.prompt_logprobs
        if logprobs is not None and self._names is not None and num_best is not None:
            choice.prompt_logprobs = prompt_logprobs(logprobs.best(num_best), self._names)

    def _finish_reason(self, output: EngineOutput) -> Literal["stop", "length"] | None:
        if output.finish_reason is None:
            return None
        if self._request.max_tokens == 0:
            return "length"
        return "stop" if output.finish_reason is FinishReason.STOP else "length"
