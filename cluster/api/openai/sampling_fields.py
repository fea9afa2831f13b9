"""The fields of sampling and speculation, which chat and plain completions share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from cluster.api.openai.schema import RequestModel, StreamOptions, at_most, entries, number, option
from cluster.api.openai.structure import KINDS, StructuredOutputs, structured_output
from cluster.replica.limits import MAX_TOKEN_IDS, check_cache_salt, check_model, check_priority
from specdec.config.engine import MAX_STREAM_INTERVAL
from specdec.config.methods import METHOD_NAMES
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_OUTPUT_CHOICES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    AcceptancePreset,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
    VerifierName,
)
from specdec.types.validation import require_range

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[METHOD_NAMES]

_VLLM_NOT_HERE = {
    "use_beam_search": "left out: there is no beam search",
    "length_penalty": "left out: it is for beam search, which there is none of",
    "spaces_between_special_tokens": "left out: special tokens are not set apart",
    "logits_processors": "left out: a request brings no code",
    "guided_decoding_backend": "left out: there is one, llguidance",
    "guided_whitespace_pattern": "left out: JSON is written without whitespace",
    "kv_transfer_params": "left out: KV is not passed between instances",
    "vllm_xargs": "left out: there are no further arguments",
    "mm_processor_kwargs": "left out: the models read text only",
    "allowed_media_domains": "left out: the models read text only",
}

_ALL_TOKENS = -1
"""What vLLM calls a top_k that keeps every token; 0 here."""

COPIED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
)
"""Fields that SamplingParams has by the same name; their limits are checked there."""


_Biases = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES), entries(MAX_LOGIT_BIASES)]


class Speculation(RequestModel):
    """How to speculate for this request; see docs/sampling.md. Left out: as configured."""

    enabled: bool | None = option("false opts out, true asks for it where it is loaded")
    num_speculative_tokens: int | None = number("draft tokens a step", 0, 32)
    method: MethodName | None = option("what drafts; it must be loaded")
    verifier: VerifierName | None = option("what decides which draft tokens are kept")
    typical_epsilon: float | None = number("of verifier `typical`", 0, 1)
    typical_delta: float | None = number("of verifier `typical`", 0, 1)
    acceptance_threshold: float | AcceptancePreset | Literal["auto"] | None = option(
        "of verifier `threshold`: a probability, or a preset's name"
    )
    scale_draft_temperature: bool | None = option(
        "lowers the draft model's temperature the more it is sure"
    )

    def to_options(self) -> SpeculationOptions:
        """As the engine takes it. Raises InvalidValueError."""
        return SpeculationOptions(**self.model_dump(exclude_unset=True))


class SamplingFields(RequestModel):
    """What `/v1/chat/completions` and `/v1/completions` are asked in the same words."""

    refused = MappingProxyType(_VLLM_NOT_HERE)

    model: str | None = option(
        "the model that shall answer, at most 256 characters; left out: the one that is loaded"
    )
    n: int | None = number("choices to generate for each prompt", 1, 128)
    temperature: float | None = number("divides the logits; 0 takes the likeliest token", 0, 100)
    top_p: float | None = number("keeps the likeliest tokens that sum to so much, above 0", 0, 1)
    presence_penalty: float | None = number("off the logits of tokens said before", -2, 2)
    frequency_penalty: float | None = number("the same for each time that it was said", -2, 2)
    logit_bias: _Biases | None = option(
        "added to the logits, by token id; from -100 to 100, at most 1024"
    )
    stop: str | Annotated[list[str], at_most(MAX_STOP_STRINGS)] | None = option(
        "strings that end the text before them; at most 16 of 1 to 256 characters"
    )
    seed: int | None = number("fixes every random choice, to 2^63 - 1; left out: any", 0)
    stream: bool = option("whether the answer comes as server-sent events", False)
    stream_options: StreamOptions | None = option("with `stream` only")
    user: str | None = option("accepted and not used")
    top_k: int | None = number("keeps the so many likeliest tokens; 0 or -1 keeps all", -1)
    min_p: float | None = number("keeps tokens so likely beside the likeliest", 0, 1)
    repetition_penalty: float | None = number(
        "divides positive logits of tokens in prompt and output; above 0", 0, 100
    )
    stop_token_ids: Annotated[list[int], at_most(MAX_STOP_TOKEN_IDS)] | None = option(
        "tokens that end the text; at most 256"
    )
    include_stop_str_in_output: bool | None = option("leaves what stopped the text in it")
    ignore_eos: bool | None = option("goes on after an end-of-sequence token, for benchmarks")
    min_tokens: int | None = number("tokens before the text may end, to the most that may come", 0)
    skip_special_tokens: bool | None = option("false shows special tokens in the text")
    bad_words: Annotated[list[str], at_most(MAX_BAD_WORDS)] | None = option(
        "texts not to say; at most 256 of 1 to 256 characters"
    )
    allowed_token_ids: Annotated[list[int], at_most(MAX_TOKEN_IDS)] | None = option(
        "the only tokens that may be drawn"
    )
    prompt_logprobs: int | None = number(
        "the likeliest tokens to tell of at each place of the prompt, beside its own", 0, 20
    )
    truncate_prompt_tokens: int | None = number(
        "keeps only the so many last tokens of a prompt", 1, MAX_TOKEN_IDS
    )
    structured_outputs: StructuredOutputs | None = option("what the whole text has to be")
    guided_json: str | dict[str, Any] | None = option("JSON that this schema accepts")
    guided_regex: str | None = option("a text that this regular expression matches as a whole")
    guided_choice: Annotated[list[str], at_most(MAX_OUTPUT_CHOICES)] | None = option(
        "one of these texts"
    )
    guided_grammar: str | None = option("a text of this grammar, in Lark or GBNF")
    return_token_ids: bool = option("tells the ids of the prompt's and the answer's tokens", False)
    return_tokens_as_token_ids: bool = option(
        "names tokens in logprobs `token_id:7` instead of by text", False
    )
    priority: int = option("lower goes first, from -1000 to 1000", 0)
    cache_salt: str | None = option(
        "keeps cached prompts and drafts apart from those of others; at most 128 characters"
    )
    request_id: str | None = option("in place of the header X-Request-Id")
    stream_interval: int | None = number(
        "new tokens that an event of a stream waits for", 1, MAX_STREAM_INTERVAL
    )
    speculation: Speculation | None = option("how to speculate for this request")

    def check_together(self) -> None:
        """Raises InvalidValueError for what cannot be asked together."""
        if self.stream_options is not None and not self.stream:
            limit = "left out unless stream is true"
            raise InvalidValueError("stream_options", self.stream_options.model_dump(), limit)
        require_range("stream_interval", self.stream_interval, 1, MAX_STREAM_INTERVAL)
        require_range("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_TOKEN_IDS)
        check_model(self.model or "")
        check_priority(self.priority)
        check_cache_salt(self.cache_salt or "")

    def sent_names(self) -> dict[str, str]:
        """The way in which a form was asked for."""
        names = self.structured_outputs.sent_names() if self.structured_outputs else {}
        guided = {own: f"guided_{name}" for name, own in KINDS.items()}
        used = {own: name for own, name in guided.items() if getattr(self, name) is not None}
        return names | {f"structured_output.{own}": name for own, name in used.items()}

    @property
    def tells_usage_always(self) -> bool:
        """Whether each event of a stream tells the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def tells_usage_at_end(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def sampling_params(fields: SamplingFields, **decided: Any) -> SamplingParams:
    """What the engine is asked; `decided`: what the two kinds of completions say differently.

    Raises InvalidValueError, by the names of SamplingParams.
    """
    given = fields.model_dump(include=set(COPIED), exclude_none=True)
    if fields.top_k == _ALL_TOKENS:
        given["top_k"] = 0
    if fields.speculation is not None:
        given["speculation"] = fields.speculation.to_options()
    stop = fields.stop
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    given["logit_bias"] = dict(_biases(fields.logit_bias or {}))
    given |= {name: value for name, value in decided.items() if value is not None}
    return SamplingParams(**given)


def _biases(biases: Mapping[str, float]) -> Iterator[tuple[int, float]]:
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise InvalidValueError("logit_bias", token, "by token ids, as decimal numbers")
        yield int(token), bias


def form_of(fields: SamplingFields, *others: StructuredOutput | None) -> StructuredOutput | None:
    """What the text has to be, of all the ways to say it; at most one may be used.

    others: what is said in ways that `SamplingFields` does not have.
    """
    guided = {
        "guided_json": fields.guided_json,
        "guided_regex": fields.guided_regex,
        "guided_choice": fields.guided_choice,
        "guided_grammar": fields.guided_grammar,
    }
    return structured_output(fields.structured_outputs, guided, *others)
