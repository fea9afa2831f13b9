"""Generation of forced calls, which ends where every choice has ended or repeated a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from cluster.api.openai.answer_reading import AnswerReading
from cluster.api.openai.parsers.pieces import AnswerParser
from cluster.api.openai.parsers.unique_calls import UniqueCalls
from cluster.api.openai.streams import PromptOutput
from specdec.types.responses import EngineOutput, FinishReason

_Parsers = tuple[AnswerParser, UniqueCalls]

OUTPUT_INTERVAL = 16
"""Tokens in an output of a response without streaming, so that a repeated call is noticed early."""


async def until_repeated(
    outputs: AsyncGenerator[PromptOutput, None],
    reading: AnswerReading,
    num_choices: int,
    on_end: Callable[[EngineOutput, int], None],
) -> AsyncGenerator[PromptOutput, None]:
    """Yield the outputs of one prompt; those of a choice up to the call that repeats another.

    The last token is the one that completes the repeated call, however many an output has. Tokens
    after it do not count. Close `outputs`, which aborts the request, once no choice goes on.

    on_end: called with the last output of a choice, and the tokens of the longest choice so far.
    """
    parsers = dict[int, _Parsers]()
    going_on, num_tokens = set(range(num_choices)), Counter[int]()
    async with aclosing(outputs):
        async for each in outputs:
            output = each.output
            if output.choice not in going_on:
                continue
            if output.choice not in parsers:
                parsers[output.choice] = reading.forced_parser()
            parser, calls = parsers[output.choice]
            output = _up_to_repeated(output, parser, calls)
            if calls.has_ended or output.finish_reason is not None:
                going_on.remove(output.choice)
            num_tokens[output.choice] += len(output.token_ids)
            is_last = not (going_on or calls.has_ended)
            output = output._replace(num_output_tokens=num_tokens.total(), is_last=is_last)
            end = _end(output, is_last=not going_on) if calls.has_ended else output
            if end.finish_reason is not None:
                on_end(end, max(num_tokens.values()))
            if not going_on:
                await outputs.aclose()  # before the client reads: nothing is measured after the end
            yield PromptOutput(each.prompt, output)
            if calls.has_ended:
                yield PromptOutput(each.prompt, end)
            if not going_on:
                return


def _up_to_repeated(output: EngineOutput, parser: AnswerParser, calls: UniqueCalls) -> EngineOutput:
    """Parse an output token by token; return it without what follows a repeated call."""
    end = 0
    for index, length in enumerate(output.text_lengths or (len(output.text),)):
        for _ in parser.feed(output.text[end : end + length]):
            pass
        end += length
        if calls.has_ended:
            return _first_tokens(output, index + 1 if output.text_lengths else None, end)
    return output


def _first_tokens(output: EngineOutput, count: int | None, num_chars: int) -> EngineOutput:
    """Return the first tokens of an output, None for all, after which the choice has not ended."""
    return output._replace(
        token_ids=output.token_ids[:count],
        text=output.text[:num_chars],
        is_drafted=output.is_drafted[:count],
        text_lengths=output.text_lengths[:count],
        logprobs=None if output.logprobs is None else output.logprobs[:count],
        finish_reason=None,
        stop_reason=None,
    )


def _end(output: EngineOutput, *, is_last: bool) -> EngineOutput:
    """Return the output that ends a choice after `output`: no token of it has ended the text."""
    return output._replace(
        token_ids=(),
        text="",
        is_drafted=(),
        text_lengths=(),
        logprobs=None,
        prompt_logprobs=None,
        finish_reason=FinishReason.STOP,
        is_last=is_last,
    )
