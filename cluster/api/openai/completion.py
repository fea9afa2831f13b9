"""`/v1/completions`: texts that are gone on with, at once or as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from cluster.api.openai.completion_choice import CompletionWriter, Echo
from cluster.api.openai.completion_schema import (
    DEFAULT_MAX_TOKENS,
    MAX_PROMPTS,
    Completion,
    CompletionChoice,
    CompletionRequest,
)
from cluster.api.openai.logprobs import TokenNames
from cluster.api.openai.offload import off_loop, tells_many
from cluster.api.openai.request_builder import (
    Origin,
    Terms,
    for_prompt,
    generate_call,
    prompt_token_ids,
    settle_seed,
    token_names,
)
from cluster.api.openai.sampling_fields import form_of, sampling_params
from cluster.api.openai.schema import Usage
from cluster.api.openai.streams import DONE, Said, answering, event
from cluster.api.openai.usage import UsageMeter
from cluster.replica.limits import MAX_TEXT_CHARS, MAX_TOKEN_IDS, require_length
from cluster.replica.router import Router
from specdec.engine.input_processor import MAX_ANSWER_LOGPROBS
from specdec.types.errors import InvalidValueError
from specdec.types.request import DetokenizeRequest, GenerateRequest
from specdec.types.sampling_params import SamplingParams


@dataclass(frozen=True)
class PromptPlan:
    """One prompt. text: what is put before its choices; empty unless asked for (`echo`)."""

    call: GenerateRequest
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class CompletionPlan:
    """A request with all that is decided before the first token.

    names: None where no log-probabilities are told.
    """

    request: CompletionRequest
    prompts: tuple[PromptPlan, ...]
    params: SamplingParams
    origin: Origin
    terms: Terms
    names: TokenNames | None

    @property
    def hides_output(self) -> bool:
        """Whether only the prompt is wanted: the engine generates one token at least."""
        return self.request.max_tokens == 0

    @property
    def calls(self) -> list[GenerateRequest]:
        """One for each prompt."""
        return [each.call for each in self.prompts]


async def plan_completion(
    router: Router, request: CompletionRequest, terms: Terms
) -> CompletionPlan:
    """Decides everything. Raises what is wrong with the request."""
    request.check_together()
    _check_length(request)
    router.check_admission(request.model or "", 1)
    params = settle_seed(completion_params(request))
    given = _prompts(request)
    router.check_admission(request.model or "", params.n * len(given))
    is_seed_given = request.seed is not None
    each_params = [
        for_prompt(params, index, is_seed_given=is_seed_given) for index in range(len(given))
    ]
    prompts = [
        await _plan_prompt(router, request, prompt, own, terms)
        for prompt, own in zip(given, each_params, strict=True)
    ]
    _check_num_logprobs(request, params, prompts, router.max_tokens(params))
    needs_names = request.logprobs is not None or request.prompt_logprobs is not None
    return CompletionPlan(
        request=request,
        prompts=tuple(prompts),
        params=params,
        origin=Origin(f"cmpl-{terms.request_id}", router.config.served_model_name),
        terms=terms,
        names=await token_names(router, request) if needs_names else None,
    )


def completion_params(request: CompletionRequest) -> SamplingParams:
    """What the engine is asked. Raises InvalidValueError."""
    form = request.response_format.to_structure() if request.response_format else None
    echoed = request.logprobs if request.echo else None
    wanted = [each for each in (echoed, request.prompt_logprobs) if each is not None]
    return sampling_params(
        request,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else max(1, request.max_tokens),
        logprobs=request.logprobs,
        prompt_logprobs=max(wanted, default=None),
        structured_output=form_of(request, form),
    )


async def complete(router: Router, plan: CompletionPlan) -> Completion:
    """The whole answer."""
    writers, meter = _writers(plan), UsageMeter()
    async with aclosing(answering(router, plan.calls, plan.terms.deadline)) as said:
        async for each in said:
            meter.add(each.prompt, each.output)
            writers[_index(plan, each)].add(each.output)
    build = partial(_whole, plan, writers, meter)
    return await off_loop(build, is_large=plan.names is not None)


async def stream_completion(
    plan: CompletionPlan, said: AsyncGenerator[Said, None]
) -> AsyncGenerator[bytes, None]:
    """The events of an answer; the first of each choice brings what is echoed."""
    writers, meter = _writers(plan), UsageMeter()
    echoes = plan.names is not None and plan.request.echo
    async for each in said:
        tell = partial(_events, plan, writers, meter, each)
        is_large = echoes or tells_many(each.output, plan.names)
        for told in await off_loop(tell, is_large=is_large):
            yield told
    if plan.request.tells_usage_at_end:
        chunk = _completion(plan, [])
        chunk.usage = _usage(plan, meter)
        yield event(chunk.to_json())
    yield DONE


def _whole(
    plan: CompletionPlan, writers: Sequence[CompletionWriter], meter: UsageMeter
) -> Completion:
    completion = _completion(plan, [writer.choice() for writer in writers])
    completion.usage = _usage(plan, meter)
    return completion


def _events(
    plan: CompletionPlan, writers: Sequence[CompletionWriter], meter: UsageMeter, said: Said
) -> list[bytes]:
    """What an output is told by: one event, or none where nothing shows yet."""
    meter.add(said.prompt, said.output)
    choice = writers[_index(plan, said)].chunk(said.output)
    if choice is None:
        return []
    chunk = _completion(plan, [choice])
    if plan.request.tells_usage_always:
        chunk.usage = _usage(plan, meter)
    return [event(chunk.to_json())]


def _index(plan: CompletionPlan, said: Said) -> int:
    return said.prompt * plan.params.n + said.output.choice


def _completion(plan: CompletionPlan, choices: list[CompletionChoice]) -> Completion:
    assert plan.params.seed is not None, "the seed is settled when a completion is planned"
    completion = Completion(
        id=plan.origin.id,
        object="text_completion",
        created=plan.origin.created,
        model=plan.origin.model,
        seed=plan.params.seed,
        choices=choices,
    )
    if plan.request.tells_usage_at_end:
        completion.usage = None  # set, so that it is told
    return completion


def _usage(plan: CompletionPlan, meter: UsageMeter) -> Usage:
    return meter.usage(meter.num_output_tokens if plan.hides_output else 0)


def _writers(plan: CompletionPlan) -> list[CompletionWriter]:
    echoes = [Echo(prompt.token_ids, prompt.text) for prompt in plan.prompts]
    return [
        CompletionWriter(place * plan.params.n + choice, plan.names, echo, plan.request)
        for place, echo in enumerate(echoes)
        for choice in range(plan.params.n)
    ]


async def _plan_prompt(
    router: Router,
    request: CompletionRequest,
    given: str | list[int],
    params: SamplingParams,
    terms: Terms,
) -> PromptPlan:
    adds = request.add_special_tokens
    token_ids = await prompt_token_ids(router, request, given, add_special_tokens=adds)
    is_as_given = isinstance(given, str) and request.truncate_prompt_tokens is None
    text = ""
    if request.echo:
        asked = DetokenizeRequest(token_ids, request.model or "")
        text = str(given) if is_as_given else await router.detokenize(asked)
    call = generate_call(router, request, token_ids, params, terms.request_id)
    return PromptPlan(call, token_ids, text)


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """One or several; each is a text or token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        _check_prompt("prompt", prompt)
        return [prompt]
    token_ids = [each for each in prompt if isinstance(each, int)]
    if token_ids:
        _check_prompt("prompt", token_ids)
        return [token_ids]
    prompts = [each for each in prompt if not isinstance(each, int)]
    require_length("prompt", len(prompts), 1, MAX_PROMPTS, "prompts")
    for index, each in enumerate(prompts):
        _check_prompt(f"prompt[{index}]", each)
    return prompts


def _check_prompt(name: str, prompt: str | list[int]) -> None:
    if isinstance(prompt, str):
        require_length(name, len(prompt), 1, MAX_TEXT_CHARS, "characters")
    else:
        require_length(name, len(prompt), 1, MAX_TOKEN_IDS, "tokens")


def _check_num_logprobs(
    request: CompletionRequest,
    params: SamplingParams,
    prompts: Sequence[PromptPlan],
    max_tokens: int,
) -> None:
    """Holds what is told at once to a limit: of all prompts, choices and echoes together.

    max_tokens: how long a choice can get. In a stream it is told bit by bit.
    """
    num_prompt_tokens = sum(len(each.token_ids) for each in prompts)
    num_places = params.n * num_prompt_tokens if request.echo else 0
    if not (request.stream or request.max_tokens == 0):
        num_places += len(prompts) * params.n * max_tokens
    answers = 0 if request.logprobs is None else (1 + request.logprobs) * num_places
    wanted = request.prompt_logprobs
    num_told = answers + (0 if wanted is None else (1 + wanted) * num_prompt_tokens)
    if num_told > MAX_ANSWER_LOGPROBS:
        limit = f"so few that all prompts, choices and echoes have at most {MAX_ANSWER_LOGPROBS}"
        limit += f" in all, each token's own included; these may have {num_told}"
        name = "logprobs" if answers else "prompt_logprobs"
        raise InvalidValueError(name, request.logprobs if answers else wanted, limit)


def _check_length(request: CompletionRequest) -> None:
    if request.max_tokens == 0 and not request.echo:
        raise InvalidValueError("max_tokens", 0, "at least 1 unless echo is true")
