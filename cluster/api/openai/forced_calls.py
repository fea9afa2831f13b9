"""Generation of forced calls, which ends where every choice has ended or repeated a call."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.api.openai.conversation import ToolUse
from cluster.api.openai.parsers.unique_calls import UniqueCalls
from cluster.api.openai.streams import PromptOutput
from specdec.types.responses import FinishReason

OUTPUT_INTERVAL = 16
"""Tokens in an output of a response without streaming, so that a repeated call is noticed early."""


async def until_repeated(
    outputs: AsyncGenerator[PromptOutput, None], tools: ToolUse, num_choices: int
) -> AsyncGenerator[PromptOutput, None]:
    """Yield the outputs of one prompt; those of a choice up to the call that repeats another.

    Close `outputs`, which aborts the request, once no choice goes on.
    """
    parsers = dict[int, UniqueCalls]()
    going_on = set(range(num_choices))
    async with aclosing(outputs):
        async for each in outputs:
            output = each.output
            if output.choice not in going_on:
                continue
            parser = parsers.setdefault(output.choice, tools.unique_parser())
            for _ in parser.feed(output.text):
                pass
            if parser.has_ended:
                output = output._replace(finish_reason=FinishReason.STOP, stop_reason=None)
            if output.finish_reason is not None:
                going_on.remove(output.choice)
            yield PromptOutput(each.prompt, output._replace(is_last=not going_on))
            if not going_on:
                return
