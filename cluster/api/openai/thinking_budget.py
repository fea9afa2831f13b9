"""Thinking budgets: reasoning that is longer than a number of tokens is ended.

The answer is generated up to the budget. If its reasoning is still open there, the mark that ends
it is appended, and generation resumes behind it as after a broken stream: with the same seed, from
the cached prompt. Drafts go on in both parts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from cluster.replica.router import Router
from specdec.types.request import GenerateRequest
from specdec.types.responses import EngineOutput, FinishReason


@dataclass(frozen=True)
class ThinkingBudget:
    """Limit of reasoning. closing, closing_ids: the text that ends it, and its tokens.

    marks: texts by which the model ends it itself.
    """

    num_tokens: int
    closing: str
    closing_ids: tuple[int, ...]
    marks: Sequence[str]

    def is_open(self, text: str) -> bool:
        """Return whether the reasoning in a text has not ended."""
        return not any(mark in text for mark in self.marks)


async def generate_within_budget(
    router: Router, call: GenerateRequest, budget: ThinkingBudget
) -> AsyncGenerator[EngineOutput, None]:
    """Yield the outputs of a call with one choice, whose reasoning the budget ends.

    Raise what `Router.generate` and its outputs raise.
    """
    most = router.max_tokens(call.params)
    limited = replace(
        call.params,
        max_tokens=min(budget.num_tokens, most),
        min_tokens=min(call.params.min_tokens, budget.num_tokens, most),
    )
    token_ids, text, last = list[int](), "", None
    async for output in _outputs(router, replace(call, params=limited)):
        token_ids += output.token_ids
        text += output.text
        is_cut = output.finish_reason is FinishReason.LENGTH and len(token_ids) < most
        last = output._replace(finish_reason=None, is_last=False) if is_cut else None
        yield last or output
    if last is None:
        return
    if budget.is_open(text):
        token_ids += budget.closing_ids
        if len(token_ids) >= most:  # no token of an answer would follow
            yield last._replace(
                token_ids=(),
                text="",
                is_drafted=(),
                finish_reason=FinishReason.LENGTH,
                is_last=True,
            )
            return
        last = _forced(last, budget)
        yield last
    resumed = replace(call, resume_token_ids=tuple(token_ids))
    async for output in _outputs(router, resumed):
        yield output._replace(
            speculation=last.speculation.plus(output.speculation),
            prediction=last.prediction.plus(output.prediction),
        )


def _forced(last: EngineOutput, budget: ThinkingBudget) -> EngineOutput:
    """Return the output with the tokens that end the reasoning."""
    count = len(budget.closing_ids)
    return last._replace(
        token_ids=budget.closing_ids,
        text=budget.closing,
        num_output_tokens=last.num_output_tokens + count,
        is_drafted=(False,) * count,
        prompt_logprobs=None,
    )


async def _outputs(router: Router, call: GenerateRequest) -> AsyncGenerator[EngineOutput, None]:
    generation = await router.generate(call)
    async with aclosing(generation.outputs) as outputs:
        async for output in outputs:
            yield output
