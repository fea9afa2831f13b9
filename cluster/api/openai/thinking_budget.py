"""Thinking budgets: reasoning that is longer than a number of tokens is ended.

The answer is generated up to the budget. If its reasoning is still open there, the mark that ends
it is appended, and generation resumes after it as after a broken stream: with the same seed, from
the cached prompt. Drafts go on in both parts. Where the grammar of a request permits no mark, as
within a call that began in the reasoning, or a stop token of the mark would end the answer before
min_tokens, generation resumes without it.

The engine ends the first part as any answer: with text that it held back, such as half a character
or the start of a stop string. Here the text goes on, so that only what is certain is sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from cluster.api.openai.parsers.reasoning import ReasoningSyntax
from cluster.replica.router import Router
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.types.deadline import Deadline
from specdec.types.errors import InvalidValueError
from specdec.types.request import Conversation, GenerateRequest
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class ThinkingBudget:
    """Limit of reasoning. closing_ids: the tokens that end it. syntax: its marks in the answer."""

    num_tokens: int
    closing_ids: tuple[int, ...]
    syntax: ReasoningSyntax


async def generate_within_budget(
    router: Router,
    call: GenerateRequest,
    deadline: Deadline,
    budget: ThinkingBudget,
    on_admitted: Callable[[], None] | None,
) -> AsyncGenerator[EngineOutput, None]:
    """Yield the outputs of a call with one choice, whose reasoning the budget ends.

    Raise what `Router.generate` and its outputs raise.
    """
    limited, most = _first_part(router, call, budget)
    token_ids, text = list[int](), ""
    detokenizer = IncrementalDetokenizer.of(router.text.tokenizer, call.params, _token_ids(call))
    async with aclosing(_outputs(router, limited, deadline, on_admitted=on_admitted)) as first:
        async for output in first:
            token_ids += output.token_ids
            text += output.text
            detokenizer.append_until_stop(output.token_ids)
            certain = detokenizer.take()
            if output.finish_reason is FinishReason.LENGTH and len(token_ids) < most:
                yield (last := _continued(output, certain, detokenizer.lengths))
                break
            yield output
        else:
            return
        forced = None
        if budget.syntax.is_open(text) and not _ends_early(len(token_ids), budget, call.params):
            if len(token_ids) + len(budget.closing_ids) >= most:  # no token of an answer follows
                yield _end(last, detokenizer)
                return
            forced = _forced(last, budget, detokenizer, call.params)
            if forced.is_last:
                yield forced
                return
        # The first part's stream is open until here, so that a drain waits for both parts.
        rest = _second_part(router, call, deadline, token_ids, last, forced)
        async with aclosing(rest):
            async for output in rest:
                yield output


async def _second_part(
    router: Router,
    call: GenerateRequest,
    deadline: Deadline,
    token_ids: list[int],
    last: EngineOutput,
    forced: EngineOutput | None,
) -> AsyncGenerator[EngineOutput, None]:
    """Yield the outputs after `token_ids` and `forced`, or without it if the engine rejects it."""
    for before in (forced, None) if forced else (None,):
        resumed = [*token_ids, *(before.token_ids if before else ())]
        async with aclosing(_resumed(router, call, deadline, resumed, before or last)) as outputs:
            try:
                first = await anext(outputs)
            except InvalidValueError as error:
                if before is None or not _is_of_grammar(error, call.params):
                    raise
                continue
            if before is not None:
                yield before
            yield first
            async for output in outputs:
                yield output
        return


def _is_of_grammar(error: InvalidValueError, params: SamplingParams) -> bool:
    """Return whether the engine rejects resumed tokens for the grammar of the request."""
    return params.structured_output is not None and error.field == "resume_token_ids"


async def _resumed(
    router: Router,
    call: GenerateRequest,
    deadline: Deadline,
    token_ids: Sequence[int],
    last: EngineOutput,
) -> AsyncGenerator[EngineOutput, None]:
    """Yield the outputs after `token_ids`; their counts include those of the last one before."""
    resumed = replace(call, resume_token_ids=tuple(token_ids))
    async with aclosing(_outputs(router, resumed, deadline, is_admitted=True)) as outputs:
        async for output in outputs:
            yield output._replace(
                speculation=last.speculation.plus(output.speculation),
                prediction=last.prediction.plus(output.prediction),
            )


def _first_part(
    router: Router, call: GenerateRequest, budget: ThinkingBudget
) -> tuple[GenerateRequest, int]:
    """Return the call up to the budget, and the most tokens of the whole answer."""
    room = max(1, router.max_model_len - len(_token_ids(call)))
    most, asked = min(router.max_tokens(call.params), room), call.params.max_tokens
    count = min(budget.num_tokens, most)
    if asked is not None and asked > room:  # refused by the engine, which must see it now
        count = asked
    min_tokens = min(call.params.min_tokens, count)
    params = replace(call.params, max_tokens=count, min_tokens=min_tokens)
    return replace(call, params=params), most


def _token_ids(call: GenerateRequest) -> list[int]:
    assert not isinstance(call.prompt, str | Conversation), "a chat that was not tokenized"
    return [each for each in call.prompt if isinstance(each, int)]


def _continued(output: EngineOutput, text: str, lengths: tuple[int, ...]) -> EngineOutput:
    """Return the output that reaches the budget, after which the answer continues."""
    return output._replace(text=text, text_lengths=lengths, finish_reason=None, is_last=False)


def _end(last: EngineOutput, detokenizer: IncrementalDetokenizer) -> EngineOutput:
    """Return the output that ends the answer without further tokens."""
    return last._replace(
        token_ids=(),
        text=detokenizer.flush(),
        is_drafted=(),
        text_lengths=(),
        finish_reason=FinishReason.LENGTH,
        is_last=True,
    )


def _forced(
    last: EngineOutput,
    budget: ThinkingBudget,
    detokenizer: IncrementalDetokenizer,
    params: SamplingParams,
) -> EngineOutput:
    """Return the output with the tokens that end the reasoning, up to one that ends the text."""
    stop: str | int | None = None
    count = 0
    while stop is None and count < len(budget.closing_ids):
        stop = _append_forced(detokenizer, budget.closing_ids[count], params)
        count += 1
    return last._replace(
        token_ids=budget.closing_ids[:count],
        text=detokenizer.take() if stop is None else detokenizer.flush(),
        num_output_tokens=last.num_output_tokens + count,
        is_drafted=(False,) * count,
        text_lengths=detokenizer.lengths,
        prompt_logprobs=None,
        finish_reason=None if stop is None else FinishReason.STOP,
        stop_reason=stop,
        is_last=stop is not None,
    )


def _ends_early(num_tokens: int, budget: ThinkingBudget, params: SamplingParams) -> bool:
    """Return whether a stop token of the mark, after `num_tokens`, stands before min_tokens."""
    too_early = budget.closing_ids[: max(0, params.min_tokens - num_tokens)]
    return not set(params.stop_token_ids).isdisjoint(too_early)


def _append_forced(
    detokenizer: IncrementalDetokenizer, token_id: int, params: SamplingParams
) -> str | int | None:
    """Add a token; return the stop string or the stop token that ends the text, if any."""
    is_stop = token_id in params.stop_token_ids
    if is_stop and not params.include_stop_str_in_output:
        detokenizer.skip()
        return token_id
    return detokenizer.append(token_id) or (token_id if is_stop else None)


async def _outputs(
    router: Router,
    call: GenerateRequest,
    deadline: Deadline,
    *,
    is_admitted: bool = False,
    on_admitted: Callable[[], None] | None = None,
) -> AsyncGenerator[EngineOutput, None]:
    generation = await router.generate(
        call, deadline=deadline, is_admitted=is_admitted, on_admitted=on_admitted
    )
    async with aclosing(generation.outputs) as outputs:
        async for output in outputs:
            yield output
