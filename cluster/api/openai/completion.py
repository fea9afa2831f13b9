"""`/v1/completions`: plans completions of texts, and returns or streams their answer."""

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
from cluster.api.openai.offload import has_many_logprobs, offload
from cluster.api.openai.request_builder import (
    RequestContext,
    ResponseInfo,
    generate_call,
    params_for_prompt,
    prompt_token_ids,
    token_names,
    with_seed,
)
from cluster.api.openai.sampling_fields import requested_structure, sampling_params
from cluster.api.openai.schema import Usage
from cluster.api.openai.streams import DONE, PromptOutput, generate_outputs
from cluster.api.openai.usage import UsageMeter
from cluster.api.sse import event
from cluster.replica.limits import MAX_TEXT_CHARS, MAX_TOKEN_IDS, require_length
from cluster.replica.requests import DetokenizeCall, GenerateCall
from cluster.replica.router import Router
from specdec.engine.input_processor import MAX_ANSWER_LOGPROBS
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import SamplingParams


@dataclass(frozen=True)
class PromptPlan:
    """One prompt of a request. text: precedes its choices (`echo`); empty without `echo`."""

    call: GenerateCall
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class CompletionPlan:
    """A request with everything that is resolved before the first token.

    names: None without log-probabilities.
    """

    request: CompletionRequest
    prompts: tuple[PromptPlan, ...]
    params: SamplingParams
    info: ResponseInfo
    context: RequestContext
    names: TokenNames | None

    @property
    def hides_output(self) -> bool:
        """Whether the generated token is not returned: the engine generates at least one."""
        return self.request.max_tokens == 0

    @property
    def calls(self) -> list[GenerateCall]:
        """The calls, one for each prompt."""
        return [each.call for each in self.prompts]


async def plan_completion(
    router: Router, request: CompletionRequest, context: RequestContext
) -> CompletionPlan:
    """Validate and tokenize a request. Raise the errors of its fields."""
    request.check_together()
    if request.max_tokens == 0 and not request.echo:
        raise InvalidValueError("max_tokens", 0, "at least 1 unless echo is true")
    router.check_admission(request.model or "", 1)
    params = with_seed(completion_params(request))
    given = _prompts(request)
    router.check_admission(request.model or "", params.n * len(given))
    is_seed_given = request.seed is not None
    prompts = []
    for index, prompt in enumerate(given):
        prompt_params = params_for_prompt(params, index, is_seed_given=is_seed_given)
        prompts.append(await _plan_prompt(router, request, prompt, prompt_params, context))
    _check_num_logprobs(request, params, prompts, router.max_tokens(params))
    needs_names = request.logprobs is not None or request.prompt_logprobs is not None
    return CompletionPlan(
        request=request,
        prompts=tuple(prompts),
        params=params,
        info=ResponseInfo(f"cmpl-{context.request_id}", router.config.served_model_name),
        context=context,
        names=await token_names(router, request) if needs_names else None,
    )


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Build the engine's sampling parameters. Raise InvalidValueError."""
    form = request.response_format.to_structure() if request.response_format else None
    echoed = request.logprobs if request.echo else None
    requested = [each for each in (echoed, request.prompt_logprobs) if each is not None]
    return sampling_params(
        request,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else max(1, request.max_tokens),
        logprobs=request.logprobs,
        prompt_logprobs=max(requested, default=None),
        structured_output=requested_structure(request, form),
    )


async def complete(router: Router, plan: CompletionPlan) -> Completion:
    """Run a planned request and return the complete answer."""
    writers, meter = _writers(plan), UsageMeter()
    async with aclosing(generate_outputs(router, plan.calls, plan.context.deadline)) as outputs:
        async for each in outputs:
            meter.add(each.prompt, each.output)
            writers[_index(plan, each)].add(each.output)
    build = partial(_whole, plan, writers, meter)
    return await offload(build, is_large=plan.names is not None)


async def stream_completion(
    plan: CompletionPlan, outputs: AsyncGenerator[PromptOutput, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer; the first event of each choice has the echo."""
    writers, meter = _writers(plan), UsageMeter()
    echoes = plan.names is not None and plan.request.echo
    async for each in outputs:
        encode = partial(_events, plan, writers, meter, each)
        is_large = echoes or has_many_logprobs(each.output, plan.names)
        for data in await offload(encode, is_large=is_large):
            yield data
    if plan.request.includes_usage:
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
    plan: CompletionPlan,
    writers: Sequence[CompletionWriter],
    meter: UsageMeter,
    prompt_output: PromptOutput,
) -> list[bytes]:
    """Encode an output as one event; none if it adds nothing visible."""
    meter.add(prompt_output.prompt, prompt_output.output)
    choice = writers[_index(plan, prompt_output)].chunk(prompt_output.output)
    if choice is None:
        return []
    chunk = _completion(plan, [choice])
    if plan.request.has_continuous_usage:
        chunk.usage = _usage(plan, meter)
    return [event(chunk.to_json())]


def _index(plan: CompletionPlan, prompt_output: PromptOutput) -> int:
    return prompt_output.prompt * plan.params.n + prompt_output.output.choice


def _completion(plan: CompletionPlan, choices: list[CompletionChoice]) -> Completion:
    assert plan.params.seed is not None, "plan_completion has set the seed"
    completion = Completion(
        id=plan.info.id,
        object="text_completion",
        created=plan.info.created,
        model=plan.info.model,
        seed=plan.params.seed,
        choices=choices,
    )
    if plan.request.includes_usage:
        completion.usage = None  # set, and thus serialized as null
    return completion


def _usage(plan: CompletionPlan, meter: UsageMeter) -> Usage:
    return meter.usage(meter.num_output_tokens if plan.hides_output else 0)


def _writers(plan: CompletionPlan) -> list[CompletionWriter]:
    echoes = [Echo(prompt.token_ids, prompt.text) for prompt in plan.prompts]
    return [
        CompletionWriter(index * plan.params.n + choice, plan.names, echo, plan.request)
        for index, echo in enumerate(echoes)
        for choice in range(plan.params.n)
    ]


async def _plan_prompt(
    router: Router,
    request: CompletionRequest,
    given: str | list[int],
    params: SamplingParams,
    context: RequestContext,
) -> PromptPlan:
    token_ids = await prompt_token_ids(
        router, request, given, add_special_tokens=request.add_special_tokens
    )
    is_unchanged = isinstance(given, str) and request.truncate_prompt_tokens is None
    text = ""
    if request.echo:
        decode = DetokenizeCall(request.model or "", token_ids)
        text = str(given) if is_unchanged else await router.detokenize(decode)
    call = generate_call(router, request, token_ids, params, context.request_id)
    return PromptPlan(call, token_ids, text)


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids. Raise InvalidValueError."""
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
    """Limit the log-probabilities of one response: of all prompts, choices and echoes together.

    max_tokens: most tokens of a choice. A stream sends those of the answer in parts, uncounted.
    """
    num_prompt_tokens = sum(len(each.token_ids) for each in prompts)
    num_positions = params.n * num_prompt_tokens if request.echo else 0
    if not (request.stream or request.max_tokens == 0):
        num_positions += len(prompts) * params.n * max_tokens
    num_in_choices = 0 if request.logprobs is None else (1 + request.logprobs) * num_positions
    per_prompt_token = 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs
    num_logprobs = num_in_choices + per_prompt_token * num_prompt_tokens
    if num_logprobs > MAX_ANSWER_LOGPROBS:
        limit = f"lower: prompts, choices and echoes may have {MAX_ANSWER_LOGPROBS} in all"
        limit += f" (got up to {num_logprobs}, with the tokens' own)"
        name = "logprobs" if num_in_choices else "prompt_logprobs"
        raise InvalidValueError(name, getattr(request, name), limit)
