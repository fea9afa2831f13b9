"""What a request may ask of sampling and of speculation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Literal, get_args

from specdec.types.errors import InvalidValueError
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


VerifierName = Literal["coupled", "rejection", "block", "typical", "threshold"]
VERIFIERS: tuple[VerifierName, ...] = get_args(VerifierName)
LOSSY_VERIFIERS: frozenset[VerifierName] = frozenset(("typical", "threshold"))
"""Those that may return other tokens than the target would, and so are never taken unasked."""

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
SEED_LIMIT = 2**63
MAX_SCHEMA_CHARS = 256 * 1024
MAX_REGEX_CHARS = 16 * 1024
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_OUTPUT_CHOICES = 4096
MAX_OUTPUT_CHOICE_CHARS = 4096
_INT32_LIMIT = 2**31


@dataclass(frozen=True)
class SpeculationOptions:
    """Per-request speculation. With a lossless verifier it changes the speed, not what is likely.

    enabled: None leaves it to the service; False opts out; True asks for it where it is loaded.
    num_speculative_tokens: draft tokens a step; None takes the service's number.
    method: name of a method that the service has loaded; None takes the service's.
    verifier: what decides which draft tokens are kept (`specdec.sampling.verifiers`); None takes the
        service's. With `coupled` the seed alone fixes the tokens; with `rejection` and `block`,
        which are lossless too, they depend on the drafts as well, but their distribution does not.
        `typical` and `threshold` are not lossless, and are faster for it.
    typical_epsilon, typical_delta: of verifier `typical`: a draft token is kept when its target
        probability is above min(epsilon, delta * exp(-entropy)); Cai et al. 2024 (Medusa), section
        2.3.1. None: 0.09 and 0.3.
    acceptance_threshold: of verifier `threshold`: the least target probability with which a draft
        token is kept, or the name of a preset; `auto` chooses the preset by what is asked for:
        strict for code, medium for structured output, lenient for other text. None: `auto`.
    scale_draft_temperature: whether the draft's temperature is lowered the more the draft model is
        sure: by a factor of 1 less its highest probability. None: not.
    """

    enabled: bool | None = None
    num_speculative_tokens: int | None = None
    method: str | None = None
    verifier: VerifierName | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    acceptance_threshold: AcceptanceThreshold | None = None
    scale_draft_temperature: bool | None = None

    def __post_init__(self) -> None:
        check_types(self, "speculation.")
        count, high = self.num_speculative_tokens, MAX_NUM_SPECULATIVE_TOKENS
        require_range("speculation.num_speculative_tokens", count, 0, high)
        require_choice("speculation.verifier", self.verifier, VERIFIERS)
        for name in ("typical_epsilon", "typical_delta"):
            require_range(f"speculation.{name}", getattr(self, name), 0, 1)
        threshold = self.acceptance_threshold
        if isinstance(threshold, str):
            presets = (*ACCEPTANCE_PRESETS, "auto")
            require_choice("speculation.acceptance_threshold", threshold, presets)
        else:
            require_range("speculation.acceptance_threshold", threshold, 0, 1)


@dataclass(frozen=True)
class StructuredOutput:
    """What the whole text of an output has to be. Exactly one of the fields says it.

    json_schema: JSON that the schema (drafts 4 to 2020-12) accepts, without whitespace between its
        parts. A keyword that is known but cannot be enforced is refused, never passed over.
    json_object: any JSON object.
    regex: a text that the regular expression matches as a whole, in the syntax of Rust's regex
        crate: no look-around, no back-references.
    grammar: a text of a context-free grammar, in the EBNF of llguidance's Lark (`start: ...`) or in
        llama.cpp's GBNF (`root ::= ...`).
    choice: one of these texts.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "structured_output.")
        if len(self._given) != 1:
            limit = f"exactly one of {', '.join(each.name for each in fields(self))}"
            raise InvalidValueError("structured_output", self._given, limit)
        check_text("structured_output.json_schema", self.json_schema, MAX_SCHEMA_CHARS)
        check_text("structured_output.regex", self.regex, MAX_REGEX_CHARS)
        check_text("structured_output.grammar", self.grammar, MAX_GRAMMAR_CHARS)
        check_texts(
            "structured_output.choice", self.choice, MAX_OUTPUT_CHOICES, MAX_OUTPUT_CHOICE_CHARS
        )

    @property
    def kind(self) -> str:
        """The field that is given."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        return [each.name for each in fields(self) if getattr(self, each.name) not in _NOT_GIVEN]


_NOT_GIVEN = (None, False, ())


@dataclass(frozen=True)
class SamplingDefaults:
    """What a model's generation_config.json asks for where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    Fields that are None are left to the model's generation_config.json, and without one do nothing.
    Lists are taken for tuples, and a string alone for a list of it in `stop`. Names and meanings
    are those of vLLM, and of the OpenAI API where it has the field. A token's logits are shaped in
    this order: allowed_token_ids, bad_words and structured output, logit_bias and min_tokens,
    repetition, frequency and presence penalty, temperature, min_p, top_k, top_p. Bad words are
    looked for in the output alone. A grammar that can only end goes before min_tokens; a request of
    which otherwise every token is ruled out ends with an error.

    n: how many choices to generate, each with random numbers of its own. Choice i is the same
        whatever n is.
    temperature: divides the logits; 0 takes the most likely token always.
    top_p: keeps the most likely tokens whose probabilities sum to at least top_p. Tokens exactly
        as likely as the last one kept are kept too, so the support never depends on sort order.
    top_k: keeps the top_k most likely tokens, ties with the last one included; 0 keeps all.
    min_p: keeps the tokens at least min_p times as likely as the most likely one.
    repetition_penalty: divides positive logits of tokens in prompt or output so far, and multiplies
        negative ones (Keskar et al. 2019, CTRL, section 4.1).
    presence_penalty: taken off the logits of tokens in the output so far.
    frequency_penalty: the same, once for each time that the token is there.
    logit_bias: added to the logits of tokens, from -100 to 100 each.
    bad_words: texts that the output shall not contain: the last token of each is never drawn where
        those before it have just been.
    allowed_token_ids: the only tokens that may be drawn; None allows all.
    stop: strings that end the text; it is cut before the first of them.
    stop_token_ids: tokens that end the text, and are in token_ids but not in the text.
    include_stop_str_in_output: leaves the stop string, or the stop token's text, in the text.
    min_tokens: how many tokens come before an end-of-sequence or stop token may be drawn, and
        before stop strings are looked for.
    max_tokens: most tokens to generate; None leaves as many as the context length allows.
    ignore_eos: goes on after an end-of-sequence token (for benchmarks).
    seed: fixes every random choice; None lets the service choose one, and tell which.
    logprobs: how many of the most likely tokens to report at each position, with the logarithms of
        their probabilities, besides the token that was drawn; None reports nothing. They are the
        model's own: taken before anything here shapes the logits.
    prompt_logprobs: the same for the prompt's tokens, of which the first has none.
    skip_special_tokens: leaves special tokens out of the text.
    structured_output: what the text has to be. Where it is complete and nothing can follow, it ends
        there: min_tokens and ignore_eos do not count against that.
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
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_types(self)
        require_range("n", self.n, 1, MAX_CHOICES)
        self._check_distribution()
        self._check_tokens()
        self._check_length()
        for name in ("logprobs", "prompt_logprobs"):
            require_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        check_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        self._check_bad_words()

    def settled(self, defaults: SamplingDefaults) -> SamplingDefaults:
        """What holds of the fields that may be left to the model."""
        asked = {each.name: getattr(self, each.name) for each in fields(defaults)}
        return replace(defaults, **{k: value for k, value in asked.items() if value is not None})

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
            limit = "at least 0" if self.max_tokens is None else f"from 0 to max_tokens ({most})"
            raise InvalidValueError("min_tokens", self.min_tokens, limit)
        if self.seed is not None and not 0 <= self.seed < SEED_LIMIT:
            raise InvalidValueError("seed", self.seed, "from 0 to 2^63 - 1")
