"""Sampling and speculation parameters of a request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_type_hints

from specdec.types.errors import InvalidValueError
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.vllm_sampling import accepts_vllm_names
from specdec.types.validation import (
    check_text,
    check_texts,
    check_types,
    require_choice,
    require_count,
    require_range,
)

DEFAULT_TYPICAL_EPSILON = 0.09
DEFAULT_TYPICAL_DELTA = 0.3

VerifierName = Literal[
    "coupled", "rejection", "block", "typical", "threshold", "confidence", "synthetic"
]
VERIFIERS: tuple[VerifierName, ...] = get_args(VerifierName)
LOSSY_VERIFIERS: frozenset[VerifierName] = frozenset(
    ("typical", "threshold", "confidence", "synthetic")
)
"""Those that may change the distribution of the output, and so are never a default."""

SERVED_VERIFIERS = tuple(name for name in VERIFIERS if name != "synthetic")
"""Those that requests may name by default: `synthetic` is for measurements only."""

AcceptancePreset = Literal["strict", "medium", "lenient"]
ACCEPTANCE_PRESETS: Mapping[AcceptancePreset, float] = MappingProxyType(
    {"strict": 0.75, "medium": 0.65, "lenient": 0.5}
)
"""Thresholds for code, for structured output, and for narrative text."""

AcceptanceThreshold = float | AcceptancePreset | Literal["auto"]

MAX_NUM_SPECULATIVE_TOKENS = 32
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORDS_CHARS = 16 * 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
SEED_LIMIT = 2**63
MAX_SCHEMA_CHARS = 256 * 1024
MAX_REGEX_CHARS = 16 * 1024
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_PREDICTION_CHARS = 1024 * 1024
MAX_OUTPUT_CHOICES = 4096
MAX_OUTPUT_CHOICE_CHARS = 4096
_INT32_LIMIT = 2**31


@dataclass(frozen=True)
class SpeculationOptions:
    """Speculation of a request. With a lossless verifier it affects speed only.

    None takes the service's setting.

    enabled: False opts out; True requests drafts where a method is loaded.
    num_speculative_tokens: draft tokens a step.
    method: name of a method that the service has loaded.
    verifier: decides which draft tokens are accepted (`specdec.sampling.verifiers`). With `coupled`
        the seed alone determines the tokens; with `rejection` and `block`, which are lossless too,
        they depend on the drafts as well, but their distribution does not. `typical`,
        `threshold` and `confidence` are not lossless, and faster. `synthetic` is for measurements:
        it accepts draft tokens at configured rates, whatever they are, where the service allows it.
    typical_epsilon, typical_delta: for verifier `typical`: a draft token is accepted if its target
        probability is above min(epsilon, delta * exp(-entropy)); Cai et al. 2024 (Medusa), section
        2.3.1. Default: 0.09 and 0.3.
    acceptance_threshold: the least probability of an accepted draft token, the target's for
        verifier `threshold` and the draft model's for `confidence`, or the name of a preset; `auto`
        chooses strict for code, medium for structured output and lenient for other text. Default:
        `auto`.
    scale_draft_temperature: whether the draft's temperature decreases with its confidence: by a
        factor of 1 less its highest probability. Default: false.
    draft_confidence_threshold: a draft model's draft ends where no token has this probability of
        being the next one; 0 for no such end. Lossless with every lossless verifier.
    prediction: text that the output is expected to resemble, such as a file to be edited. Its
        tokens are drafted as far as the output follows it, before those of any method.
    """

    enabled: bool | None = None
    num_speculative_tokens: int | None = None
    method: str | None = None
    verifier: VerifierName | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    acceptance_threshold: AcceptanceThreshold | None = None
    scale_draft_temperature: bool | None = None
    draft_confidence_threshold: float | None = None
    prediction: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_types(self, "speculation.")
        check_text("speculation.prediction", self.prediction, MAX_PREDICTION_CHARS)
        count, high = self.num_speculative_tokens, MAX_NUM_SPECULATIVE_TOKENS
        require_range("speculation.num_speculative_tokens", count, 0, high)
        require_choice("speculation.verifier", self.verifier, VERIFIERS)
        for name in ("typical_epsilon", "typical_delta", "draft_confidence_threshold"):
            require_range(f"speculation.{name}", getattr(self, name), 0, 1)
        threshold = self.acceptance_threshold
        if isinstance(threshold, str):
            presets = (*ACCEPTANCE_PRESETS, "auto")
            require_choice("speculation.acceptance_threshold", threshold, presets)
        else:
            require_range("speculation.acceptance_threshold", threshold, 0, 1)


@dataclass(frozen=True)
class StructuredOutput:
    """Constraint on the whole text of an output. Exactly one form is given.

    json_schema: JSON that is valid under the schema (drafts 4 to 2020-12), without whitespace
        between its parts. A known keyword that cannot be enforced is rejected, never ignored.
    json_object: any JSON object.
    regex: matches the whole text, in the syntax of Rust's regex crate: no look-around, no
        back-references.
    grammar: a context-free grammar, in the EBNF of llguidance's Lark (`start: ...`) or in
        llama.cpp's GBNF (`root ::= ...`).
    choice: one of these texts.
    reasoning: of reasoning before the text, which may then be any text; None allows none.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    reasoning: ReasoningMarks | None = None

    def __post_init__(self) -> None:
        check_types(self, "structured_output.")
        if self.choice is not None:
            count = len(self.choice)
            require_count("structured_output.choice", count, 1, MAX_OUTPUT_CHOICES, "strings")
        if len(self._given) != 1:
            limit = f"exactly one of {', '.join(_FORMS)}"
            raise InvalidValueError("structured_output", self._given, limit)
        check_text("structured_output.json_schema", self.json_schema, MAX_SCHEMA_CHARS)
        check_text("structured_output.regex", self.regex, MAX_REGEX_CHARS)
        check_text("structured_output.grammar", self.grammar, MAX_GRAMMAR_CHARS)
        for index, text in enumerate(self.choice or ()):
            check_text(f"structured_output.choice[{index}]", text, MAX_OUTPUT_CHOICE_CHARS)

    @property
    def kind(self) -> str:
        """The form that is given."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        return [name for name in _FORMS if getattr(self, name) not in (None, False)]


_FORMS = ("json_schema", "json_object", "regex", "grammar", "choice")


class StructuredOutputsParams(StructuredOutput):
    """`StructuredOutput` with vLLM's names of its fields, for programs that construct it."""

    def __init__(
        self,
        json: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
    ) -> None:
        """json: the schema, as JSON text or as a mapping. Raises InvalidValueError."""
        super().__init__(
            json_schema=_schema_text(json),
            json_object=bool(json_object),
            regex=regex,
            grammar=grammar,
            choice=None if choice is None else tuple(choice),
        )


GuidedDecodingParams = StructuredOutputsParams
"""The earlier name in vLLM."""


def _schema_text(schema: str | Mapping[str, Any] | None) -> str | None:
    return json.dumps(schema) if isinstance(schema, Mapping) else schema


def _as_structured_output(given: object) -> object:
    """Return vLLM's forms as a StructuredOutput, and anything else unchanged."""
    if isinstance(given, Mapping):
        known = ("json", "regex", "choice", "grammar", "json_object")
        for name in given:
            if name not in known:
                limit = f"left out; known: {', '.join(known)}"
                raise InvalidValueError(f"structured_output.{name}", given[name], limit)
        return StructuredOutputsParams(**given)
    return given


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults of a model's generation_config.json, for fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


_defaulted = attrgetter(*(each.name for each in fields(SamplingDefaults)))


@accepts_vllm_names(_as_structured_output)
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Fields that are None take the value of the model's generation_config.json, and have no effect
    without one. Lists are accepted for tuples, and a single string for `stop`. Names and meanings
    are those of vLLM, and of the OpenAI API where it has the field; the constructor also accepts
    vLLM's `structured_outputs` and `guided_decoding`, a `top_k` of -1 and `detokenize`. Logits are
    processed in this order: allowed_token_ids, bad_words and structured output, logit_bias and
    min_tokens, repetition, frequency and presence penalty, temperature, min_p, top_k, top_p. Bad
    words are searched in the output only. A grammar that can only end takes precedence over
    min_tokens. A request whose parameters otherwise rule out every token ends with an error.

    n: number of choices to generate, each with its own random numbers. Choice i does not depend on
        n.
    temperature: divides the logits; 0 always takes the most likely token.
    top_p: keeps the most likely tokens whose probabilities sum to at least top_p, and those exactly
        as likely as the last one kept, so that the support does not depend on the sort order.
    top_k: keeps the top_k most likely tokens, ties with the last one included; 0 keeps all.
    min_p: keeps the tokens at least min_p times as likely as the most likely one.
    repetition_penalty: divides positive logits of tokens in prompt or output so far, and multiplies
        negative ones (Keskar et al. 2019, CTRL, section 4.1).
    presence_penalty: subtracted from the logits of tokens in the output so far.
    frequency_penalty: the same, once for each occurrence of the token.
    logit_bias: added to the logits of tokens, from -100 to 100 each.
    bad_words: texts that the output must not contain: the last token of each is never drawn after
        those before it.
    allowed_token_ids: the only tokens that may be drawn; None allows all.
    stop: strings that end the text, which is cut before the first of them.
    stop_token_ids: tokens that end the text; they are in token_ids but not in the text.
    include_stop_str_in_output: leaves the stop string, or the stop token's text, in the text.
    min_tokens: number of tokens before an end-of-sequence or stop token may be drawn, and before
        stop strings are searched.
    max_tokens: most tokens to generate; None: as many as the context length allows.
    ignore_eos: continues after an end-of-sequence token (for benchmarks).
    seed: determines every random choice; None lets the service choose a seed, which it reports.
        As in vLLM -1 is None; another negative seed counts as the one that is 2^63 higher.
    logprobs: number of most likely tokens to report at each position, with their log-probabilities,
        besides the token that was drawn; None reports nothing. They are those of the model, before
        any parameter here.
    prompt_logprobs: the same for the prompt's tokens, of which the first has none.
    logprob_token_ids: tokens to report at each of these positions besides, whatever their
        probability; at most 128. Alone it implies a `logprobs` of 0.
    skip_special_tokens: leaves special tokens out of the text.
    structured_output: constraint on the text, which ends where it is complete and nothing can
        follow, regardless of min_tokens and ignore_eos.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None
    speculation: SpeculationOptions = SpeculationOptions()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.structured_output, StructuredOutputsParams):
            structure = StructuredOutput(**vars(self.structured_output))
            object.__setattr__(self, "structured_output", structure)
        check_types(self)
        require_range("n", self.n, 1, MAX_CHOICES)
        self._check_distribution()
        self._check_tokens()
        self._check_length()
        if self.seed is not None and self.seed < 0:
            seed = None if self.seed == -1 else self.seed + SEED_LIMIT
            object.__setattr__(self, "seed", seed)
        for name in ("logprobs", "prompt_logprobs"):
            require_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        num_given = len(self.logprob_token_ids)
        require_count("logprob_token_ids", num_given, 0, MAX_LOGPROB_TOKEN_IDS, "tokens")
        if self.logprob_token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        check_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        self._check_bad_words()

    @property
    def num_listed(self) -> int:
        """Number of log-probabilities at each position of the output, the token's own included."""
        return 0 if self.logprobs is None else 1 + self.logprobs + len(self.logprob_token_ids)

    def with_seed(self, seed: int) -> SamplingParams:
        """Return the parameters with a seed from 0 to 2^63 - 1. Nothing is checked again."""
        copied = object.__new__(SamplingParams)
        vars(copied).update(vars(self), seed=seed)
        return copied

    def resolved(self, defaults: SamplingDefaults) -> SamplingDefaults:
        """Return the parameters that a model has defaults for, with those filled in."""
        pairs = zip(_defaulted(self), _defaulted(defaults), strict=True)
        return SamplingDefaults(*[usual if given is None else given for given, usual in pairs])

    def _check_distribution(self) -> None:
        require_range("temperature", self.temperature, 0, 100)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidValueError("top_p", self.top_p, "above 0 and at most 1")
        if self.top_k is not None and not 0 <= self.top_k < _INT32_LIMIT:
            raise InvalidValueError("top_k", self.top_k, "0 (all tokens), or from 1 to 2147483647")
        require_range("min_p", self.min_p, 0, 1)
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty <= 100:
            value = self.repetition_penalty
            raise InvalidValueError("repetition_penalty", value, "above 0 and at most 100")
        require_range("presence_penalty", self.presence_penalty, -2, 2)
        require_range("frequency_penalty", self.frequency_penalty, -2, 2)

    def _check_tokens(self) -> None:
        require_count("logit_bias", len(self.logit_bias), 0, MAX_LOGIT_BIASES, "tokens")
        for token_id, bias in self.logit_bias.items():
            require_range(f"logit_bias[{token_id}]", bias, -100, 100)
        if self.allowed_token_ids is not None:
            require_count(
                "allowed_token_ids", len(self.allowed_token_ids), 1, _INT32_LIMIT - 1, "tokens"
            )
        require_count("stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS, "tokens")

    def _check_bad_words(self) -> None:
        check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        num_chars = sum(map(len, self.bad_words))
        require_count("bad_words", num_chars, 0, MAX_BAD_WORDS_CHARS, "characters in all")

    def _check_length(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidValueError("max_tokens", self.max_tokens, "at least 1")
        most = _INT32_LIMIT - 1 if self.max_tokens is None else self.max_tokens
        if not 0 <= self.min_tokens <= most:
            most_named = most if self.max_tokens is None else f"max_tokens ({most})"
            raise InvalidValueError("min_tokens", self.min_tokens, f"from 0 to {most_named}")
        if self.seed is not None and not -SEED_LIMIT <= self.seed < SEED_LIMIT:
            raise InvalidValueError("seed", self.seed, "from -2^63 to 2^63 - 1")


_NUMBERS = frozenset(
    name
    for name, kind in get_type_hints(SamplingParams).items()
    if {*(get_args(kind) or (kind,))} <= {int, float, bool, NoneType}
) - {"seed", "logit_bias"}  # requests have different seeds, and a mapping is not hashable

_of_numbers = lru_cache(maxsize=256, typed=True)(SamplingParams)


def shared_params(**given: Any) -> SamplingParams:
    """Return SamplingParams, the same object for requests with the same fields, if all are numbers.

    A negative zero becomes zero, which is equal to it.
    """
    if not given.keys() <= _NUMBERS:
        return SamplingParams(**given)
    return _of_numbers(
        **{name: each + 0.0 if isinstance(each, float) else each for name, each in given.items()}
    )
