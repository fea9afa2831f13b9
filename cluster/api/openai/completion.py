"""`/v1/completions`: prepares completions of texts and builds their response."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.api.openai.completion_choice import CompletionWriter, Echo
from cluster.api.openai.completion_schema import (
    DEFAULT_MAX_TOKENS,
    MAX_PROMPTS,
    Completion,
    CompletionChoice,
    CompletionRequest,
)
from cluster.api.openai.logprobs import TokenNames
from cluster.api.openai.request_builder import (
    RequestContext,
    ResponseInfo,
    generate_call,
    params_for_prompt,
    prompt_token_ids,
    token_names,
    with_seed,
)
from cluster.api.openai.response_builder import ResponseBuilder
from cluster.api.openai.sampling_fields import requested_structure, sampling_params
from cluster.api.openai.schema import Usage
from cluster.api.openai.streams import DONE, PromptOutput
from cluster.api.sse import event
from cluster.replica.limits import MAX_TEXT_CHARS, MAX_TOKEN_IDS, require_length
from cluster.replica.router import Router
from specdec.engine.input_processor import MAX_ANSWER_LOGPROBS
from specdec.types.errors import InvalidValueError
from specdec.types.outputs import EngineOutput
from specdec.types.request import DetokenizeRequest, GenerateRequest
from specdec.types.sampling_params import SamplingParams


async def prepare_completion(
    router: Router, request: CompletionRequest, context: RequestContext
) -> CompletionBuilder:
    """Validate and tokenize a request. Raise the errors of its fields."""
    request.check_together()
    if request.max_tokens == 0 and not request.echo:
        raise InvalidValueError("max_tokens", 0, "at least 1 unless echo is true")
    router.check_admission(request.model or "", 1)
    params = with_seed(completion_params(request))
    prompts = _prompts(request)
    router.check_admission(request.model or "", params.n * len(prompts))
    calls, echoes = list[GenerateRequest](), list[Echo]()
    for index, prompt in enumerate(prompts):
        token_ids = await prompt_token_ids(
            router, request, prompt, add_special_tokens=request.add_special_tokens
        )
        echoes.append(Echo(token_ids, await _echoed_text(router, request, prompt, token_ids)))
        own = params_for_prompt(params, index, is_seed_given=request.seed is not None)
        calls.append(generate_call(router, request, token_ids, own, context.request_id))
    _check_num_logprobs(request, params, echoes, router.max_tokens(params))
    needs_names = request.logprobs is not None or request.prompt_logprobs is not None
    info = ResponseInfo.of(f"cmpl-{context.request_id}", router, params)
    names = await token_names(router, request) if needs_names else None
    return CompletionBuilder(request, calls, echoes, info, names)


class CompletionBuilder(ResponseBuilder):
    """Builder of the response to a completion of one or several prompts."""

    def __init__(
        self,
        request: CompletionRequest,
        calls: Sequence[GenerateRequest],
        echoes: Sequence[Echo],
        info: ResponseInfo,
        names: TokenNames | None,
    ) -> None:
        """Make a builder for calls of the prompts in `echoes`."""
        super().__init__(calls, names)
        self._request = request
        self._info = info
        self._num_choices = calls[0].params.n  # of each prompt
        self._writers = [
            CompletionWriter(index, names, echoes[index // self._num_choices], request)
            for index in range(len(echoes) * self._num_choices)
        ]

    def is_large(self, output: EngineOutput) -> bool:
        """Return whether an output is worth converting on a thread, as a scored echo is."""
        return (self._request.echo and self.names is not None) or super().is_large(output)

    def add(self, each: PromptOutput) -> None:
        """Add an output to the complete response."""
        self.meter.add(each.prompt, each.output)
        self._writer(each).add(each.output)

    def body(self) -> Completion:
        """Build the complete response."""
        completion = self._completion([writer.choice() for writer in self._writers])
        completion.usage = self._usage()
        return completion

    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode an output; the first event of each choice has the echo."""
        self.meter.add(each.prompt, each.output)
        choice = self._writer(each).chunk(each.output)
        if choice is None:
            return []
        chunk = self._completion([choice])
        if self._request.has_continuous_usage:
            chunk.usage = self._usage()
        return [event(chunk.to_json())]

    def closing(self) -> list[bytes]:
        """Encode the usage, if requested, and the end."""
        if not self._request.includes_usage:
            return [DONE]
        chunk = self._completion([])
        chunk.usage = self._usage()
        return [event(chunk.to_json()), DONE]

    def _writer(self, each: PromptOutput) -> CompletionWriter:
        return self._writers[each.prompt * self._num_choices + each.output.choice]

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        completion = Completion(
            id=self._info.id,
            object="text_completion",
            created=self._info.created,
            model=self._info.model,
            seed=self._info.seed,
            choices=choices,
        )
        if self._request.includes_usage:
            completion.usage = None  # set, and thus serialized as null
        return completion

    def _usage(self) -> Usage:
        hides_output = self._request.max_tokens == 0  # the engine generates at least one token
        return self.meter.usage(self.meter.num_output_tokens if hides_output else 0)


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


async def _echoed_text(
    router: Router, request: CompletionRequest, given: str | list[int], token_ids: tuple[int, ...]
) -> str:
    if not request.echo:
        return ""
    if isinstance(given, str) and request.truncate_prompt_tokens is None:
        return given
    return await router.detokenize(DetokenizeRequest(token_ids, request.model or ""))


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
    echoes: Sequence[Echo],
    max_tokens: int,
) -> None:
    """Limit the log-probabilities of one response: of all prompts, choices and echoes together.

    max_tokens: most tokens of a choice. A stream sends those of the answer in parts, uncounted.
    """
    num_prompt_tokens = sum(len(each.token_ids) for each in echoes)
    num_positions = params.n * num_prompt_tokens if request.echo else 0
    if not (request.stream or request.max_tokens == 0):
        num_positions += len(echoes) * params.n * max_tokens
    num_in_choices = 0 if request.logprobs is None else (1 + request.logprobs) * num_positions
    per_prompt_token = 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs
    num_logprobs = num_in_choices + per_prompt_token * num_prompt_tokens
    if num_logprobs > MAX_ANSWER_LOGPROBS:
        limit = f"lower: prompts, choices and echoes may have {MAX_ANSWER_LOGPROBS} in all"
        limit += f" (got up to {num_logprobs}, with the tokens' own)"
        name = "logprobs" if num_in_choices else "prompt_logprobs"
        raise InvalidValueError(name, getattr(request, name), limit)
