"""The text of a request's outputs, made where they are read."""

from __future__ import annotations

import asyncio

from specdec.sequences.sequence import EngineRequest
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.types.responses import EngineOutput, FinishReason

_MANY_TOKENS = 1024
"""The text of more tokens takes over a millisecond."""


class OutputText:
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
            return output._replace(text=text.decode(token_ids), text_lengths=text.lengths)
        if output.finish_reason is FinishReason.STOP and not self._includes_end:
            text.extend(token_ids[:-1])  # the last one ends the text
            text.skip()
        else:
            text.extend(token_ids)
        return output._replace(text=text.flush(), text_lengths=text.lengths)

    def _begin(self, choice: int) -> IncrementalDetokenizer:
        request = self._request
        text = IncrementalDetokenizer.of(self._tokenizer, request.params, request.prompt_token_ids)
        if request.resume_token_ids:
            text.decode(request.resume_token_ids)
        self._texts[choice] = text
        return text
