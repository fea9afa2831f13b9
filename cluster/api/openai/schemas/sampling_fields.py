"""The fields that chats and plain completions share: sampling, structured output, speculation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from cluster.api.base.openai_schema import (
    RequestModel,
    StreamOptions,
    at_most,
    max_entries,
    number,
    option,
)
from cluster.api.base.unsupported_fields import ENGINE_FIELDS
from cluster.api.openai.schemas.output_format import (
    KINDS,
    ResponseFormat,
    StructuredOutputs,
    structure,
)
from cluster.replica.limits import (
    MAX_PRIORITY,
    MAX_TOKEN_IDS,
    check_cache_salt,
    check_model,
    check_resumption,
)
from specdec.config.engine import MAX_STREAM_INTERVAL
from specdec.config.speculation.methods import METHOD_NAMES
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_OUTPUT_CHOICES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    AcceptancePreset,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
    VerifierName,
    shared_params,
)
from specdec.types.validation import require_range

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[METHOD_NAMES]

_ALL_TOKENS = -1
"""vLLM's value of top_k for all tokens; SamplingParams has 0."""

Biases = Annotated[
    dict[str, float], Field(max_length=MAX_LOGIT_BIASES), max_entries(MAX_LOGIT_BIASES)
]


_GUIDED: Mapping[str, str] = {
    **{f"guided_{kind}": kind for kind in KINDS},
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
}
"""Fields of requests for structured output: vLLM's older names, and SGLang's."""


TOKEN_IDS = "null unless requested; in a stream it is left out"
"""Description of the token ids in a response."""


class Speculation(RequestModel):
    """Speculation options of a request; see docs/sampling.md. Default: the configuration."""

    enabled: bool | None = option("false disables speculation, true enables it if loaded")
    num_speculative_tokens: int | None = number("draft length in tokens", 0, 32)
    method: MethodName | None = option("drafting method; it must be loaded")
    verifier: VerifierName | None = option("algorithm that accepts or rejects draft tokens")
    typical_epsilon: float | None = number("for verifier `typical`", 0, 1)
    typical_delta: float | None = number("for verifier `typical`", 0, 1)
    acceptance_threshold: float | AcceptancePreset | Literal["auto"] | None = option(
        "for verifiers `threshold` and `confidence`: a probability, or the name of a preset"
    )
    scale_draft_temperature: bool | None = option(
        "lowers the draft model's temperature with its confidence"
    )
    draft_confidence_threshold: float | None = number(
        "ends a draft where the draft model is less sure of the next token", 0, 1
    )
    prediction: str | None = option("text that the answer is expected to resemble; it is drafted")


class SamplingFields(RequestModel):
    """The fields that `/v1/chat/completions` and `/v1/completions` share."""

    refused: ClassVar[Mapping[str, str]] = {
        **ENGINE_FIELDS,
        "use_beam_search": "left out: beam search is not supported",
        "length_penalty": "left out: beam search is not supported",
        "spaces_between_special_tokens": "left out: special tokens are not separated",
        "logits_processors": "left out: requests cannot contain code",
        "guided_decoding_backend": "left out: llguidance is the only backend",
        "guided_whitespace_pattern": "left out: JSON is written without whitespace",
        "vllm_xargs": "left out: there are no extra arguments",
        "truncation_side": "left: a prompt that is truncated keeps its last tokens",
        "no_stop_trim": "left out: use include_stop_str_in_output",
        "mm_processor_kwargs": "left out: the models read text only",
        "media_io_kwargs": "left out: the models read text only",
        "allowed_media_domains": "left out: the models read text only",
    }
    api_names: ClassVar[Mapping[str, str]] = {
        "token_ids": "prompt",
        "structured_output": "structured_outputs",
        "structured_output.json_schema": "response_format.json_schema.schema",
        "structured_output.regex": "structured_outputs.regex",
        "structured_output.choice": "structured_outputs.choice",
        "structured_output.grammar": "structured_outputs.grammar",
    }

    model: str | None = option(
        "name of the model, at most 256 characters; default: the loaded model"
    )
    n: int | None = number("number of choices for each prompt", 1, 128)
    temperature: float | None = number("divides the logits; 0 is greedy", 0, 100)
    top_p: float | None = number(
        "keeps the most likely tokens with this total probability, above 0", 0, 1
    )
    presence_penalty: float | None = number(
        "subtracted from the logits of tokens that were already generated", -2, 2
    )
    frequency_penalty: float | None = number(
        "the same, multiplied by the number of occurrences", -2, 2
    )
    logit_bias: Biases | None = option(
        "added to the logits, by token id; from -100 to 100, at most 1024 entries"
    )
    stop: str | Annotated[list[str], at_most(MAX_STOP_STRINGS)] | None = option(
        "strings that end the text, which excludes them; at most 16 of 1 to 256 characters"
    )
    seed: int | None = number(
        "seed of all random choices, from -2^63 to 2^63 - 1; default, and -1: random"
    )
    stream: bool = option("streams the answer as server-sent events", False)
    stream_options: StreamOptions | None = option("with `stream` only")
    user: str | None = option("accepted and ignored")
    top_k: int | None = number("keeps this number of most likely tokens; 0 or -1 keeps all", -1)
    min_p: float | None = number(
        "keeps tokens with at least this share of the highest probability", 0, 1
    )
    repetition_penalty: float | None = number(
        "divides positive logits of tokens in prompt and output; above 0", 0, 100
    )
    stop_token_ids: Annotated[list[int], at_most(MAX_STOP_TOKEN_IDS)] | None = option(
        "tokens that end the text; at most 256"
    )
    include_stop_str_in_output: bool | None = option("keeps the stop string in the text")
    ignore_eos: bool | None = option("continues after an end-of-sequence token, for benchmarks")
    min_tokens: int | None = number("minimum number of tokens; at most the maximum number", 0)
    skip_special_tokens: bool | None = option("false shows special tokens in the text")
    bad_words: Annotated[list[str], at_most(MAX_BAD_WORDS)] | None = option(
        "texts that are not generated; at most 256 of 1 to 256 characters"
    )
    allowed_token_ids: Annotated[list[int], at_most(MAX_TOKEN_IDS)] | None = option(
        "the only tokens that may be sampled"
    )
    prompt_logprobs: int | None = number(
        "number of most likely tokens to return at each position of the prompt, beside its own",
        0,
        20,
    )
    logprob_token_ids: Annotated[list[int], at_most(MAX_LOGPROB_TOKEN_IDS)] | None = option(
        "token ids whose log-probabilities are returned at each position of the answer, in place "
        "of the most likely ones; needs logprobs; at most 128"
    )
    truncate_prompt_tokens: int | None = number(
        "keeps only this number of last tokens of a prompt", 1, MAX_TOKEN_IDS
    )
    response_format: ResponseFormat | None = option("required format of the text")
    structured_outputs: StructuredOutputs | None = option("likewise, vLLM's field")
    guided_json: str | dict[str, Any] | None = option("JSON that matches this schema")
    guided_regex: str | None = option("a text that matches this regular expression")
    guided_choice: Annotated[list[str], at_most(MAX_OUTPUT_CHOICES, 1)] | None = option(
        "one of these texts"
    )
    guided_grammar: str | None = option("a text of this grammar, in Lark or GBNF")
    regex: str | None = option("SGLang's name of guided_regex")
    ebnf: str | None = option("SGLang's name of guided_grammar")
    return_token_ids: bool = option("returns the token ids of prompt and answer", False)
    return_tokens_as_token_ids: bool = option(
        "names tokens in logprobs by id, as `token_id:7`, instead of by text", False
    )
    priority: int = option(
        "scheduling priority, at most 1000; lower is served first. The least is that of the API "
        "key, or of the service without keys",
        0,
    )
    cache_salt: str | None = option(
        "isolates cached prompts and drafts from requests with another salt; at most 128 characters"
    )
    allow_training: bool = option(
        "whether prompt and answer may train the draft head of a service that enables this", False
    )
    receipt: bool = option(
        "returns a signed receipt of the tokens in `receipts`, from a service with a key for it",
        False,
    )
    request_id: str | None = option("instead of the header X-Request-Id")
    resume_token_ids: Annotated[list[int], at_most(MAX_TOKEN_IDS)] = Field(
        default_factory=list,  # a default would be copied for each request
        description="tokens of the answer that were received before a stream broke: the answer has "
        "what follows them. Needs the `seed` of the stream, unless temperature is 0",
        json_schema_extra={"default": []},
    )
    stream_interval: int | None = number(
        "number of new tokens in an event of a stream", 1, MAX_STREAM_INTERVAL
    )
    speculation: Speculation | None = option("speculation options of this request")

    def check_together(self) -> None:
        """Raise InvalidValueError for fields that exclude each other or are out of range."""
        options = None if self.stream else self.stream_options
        if options is not None and options != StreamOptions():
            limit = "left out unless stream is true"
            raise InvalidValueError("stream_options", "given", limit)
        require_range("stream_interval", self.stream_interval, 1, MAX_STREAM_INTERVAL)
        require_range("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_TOKEN_IDS)
        check_model(self.model or "")
        require_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_cache_salt(self.cache_salt or "")

    def check_resumption(self, params: SamplingParams, **others: Any) -> None:
        """Raise InvalidValueError for resume_token_ids with what cannot be resumed.

        params: as sent, without a chosen seed. others: fields that must be empty, by name.
        """
        check_resumption(self.resume_token_ids, params)
        for name, value in others.items():
            if value and self.resume_token_ids:
                raise InvalidValueError(name, value, "left out where resume_token_ids are given")

    @property
    def guided(self) -> dict[str, Any]:
        """The fields for structured output that are given, besides `structured_outputs`."""
        if _GUIDED.keys().isdisjoint(self.model_fields_set):
            return {}
        sent = [name for name in _GUIDED if name in self.model_fields_set]
        return {name: value for name in sent if (value := getattr(self, name)) is not None}

    def sent_names(self) -> dict[str, str]:
        """Return the names that the client used for the structured output."""
        names: dict[str, str] = {}
        if self.response_format is not None:
            names |= self.response_format.sent_names()
        if self.structured_outputs is not None:
            names |= self.structured_outputs.sent_names()
        given = {f"structured_output.{KINDS[_GUIDED[name]]}": name for name in self.guided}
        return names | given


COPIED = frozenset(
    (SamplingFields.model_fields.keys() & {each.name for each in fields(SamplingParams)})
    - {"stop", "logit_bias", "speculation"}
)
"""Fields with the same name in SamplingParams, which checks their limits."""


def sampling_params(request: SamplingFields, **decided: Any) -> SamplingParams:
    """Build SamplingParams. decided: parameters that the endpoints derive differently.

    Raise InvalidValueError with the field names of SamplingParams.
    """
    sent = COPIED & request.model_fields_set  # the others have the defaults of SamplingParams
    given = {name: value for name in sent if (value := getattr(request, name)) is not None}
    if request.top_k == _ALL_TOKENS:
        given["top_k"] = 0
    if request.speculation is not None:
        given["speculation"] = speculation_options(request)
    if request.stop:
        given["stop"] = request.stop
    if request.logit_bias:
        given["logit_bias"] = dict(token_biases(request.logit_bias))
    given |= {name: value for name, value in decided.items() if value is not None}
    return shared_params(**given)


def speculation_options(request: SamplingFields) -> SpeculationOptions:
    """Return the speculation options of a request. Raise InvalidValueError."""
    if request.speculation is None:
        return SamplingParams.speculation  # the default, which was checked once
    return SpeculationOptions(**request.speculation.model_dump(exclude_unset=True))


def token_biases(biases: Mapping[str, float]) -> Iterator[tuple[int, float]]:
    """Yield biases by token id. Raise InvalidValueError."""
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise InvalidValueError("logit_bias", token, "keyed by token ids, in decimal")
        yield int(token), bias


def requested_structure(
    request: SamplingFields, *others: StructuredOutput | None
) -> StructuredOutput | None:
    """Return the structured output of a request, None for any text.

    others: from fields that `SamplingFields` does not have. Raise InvalidValueError for different
    ones; clients send the same one by vLLM's older and newer name.
    """
    found = [each for each in others if each is not None]
    if request.structured_outputs is not None:
        found.append(request.structured_outputs.to_structure())
    found += [structure(**{_GUIDED[name]: value}) for name, value in request.guided.items()]
    if any(each != found[0] for each in found):
        kinds = [each.kind for each in found]
        limit = "one of response_format, tools, structured_outputs and the guided_ fields"
        raise InvalidValueError("structured_outputs", kinds, limit)
    return found[0] if found else None
