"""How a service drafts, and judges drafts, unless a request or an operator says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Literal, get_args

from specdec.config.length_schedule import BatchSizeTable
from specdec.config.quantization import QuantizationMethod, require_quantization
from specdec.types.adaptive_length import LengthRule
from specdec.types.control import (
    MAX_SPECULATION_THRESHOLD,
    SpeculationControl,
)
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import (
    DEFAULT_TYPICAL_DELTA,
    DEFAULT_TYPICAL_EPSILON,
    MAX_NUM_SPECULATIVE_TOKENS,
    SPECULATION_METHODS,
    VERIFIERS,
    AcceptanceThreshold,
    LookupMethod,
    SpeculationMethod,
    SpeculationOptions,
    VerifierName,
)
from specdec.types.validation import require_range

PolicyName = Literal["threshold", "table", "goodput"]


DEFAULT_SPECULATION_THRESHOLD = 32


DEFAULT_GOODPUT_THRESHOLD = 256
"""Goodput turns drafts off by itself; its bound stands for loads that no estimate covers."""


_KEYS_OF_METHODS: Mapping[SpeculationMethod, tuple[str, ...]] = MappingProxyType(
    {
        "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
        "suffix": (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        "lookahead": ("lookahead_window_size", "lookahead_ngram_size", "lookahead_pool_size"),
        "draft_model": (
            "model",
            "quantization",
            "draft_tensor_parallel_size",
            "max_model_len",
            "draft_confidence_threshold",
            "first",
            "fallback",
        ),
    }
)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How the service drafts, and judges drafts, when a request does not say.

    num_speculative_tokens: draft tokens a step and sequence.
    adaptive_length: whether each sequence's number of draft tokens follows its own acceptance, for
        requests that name no number. It starts with num_speculative_tokens.
    adaptive_length_min, adaptive_length_max, adaptive_length_raise_above,
        adaptive_length_lower_below: as in LengthRule.
    prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that `ngram` looks up, longest
        first.
    suffix_decoding_max_tree_depth: most tokens that `suffix` matches and drafts together.
    suffix_decoding_max_cached_requests: how many earlier outputs `suffix` looks at besides the
        sequence itself; 0 keeps none.
    suffix_decoding_max_spec_factor: most tokens that `suffix` drafts for each token of its match.
    suffix_decoding_min_token_prob: how probable a draft of `suffix` must be, by how often its
        tokens came so far, to be made longer.
    lookahead_window_size: guesses that `lookahead` runs each step behind a sequence's drafts.
    lookahead_ngram_size: tokens of an n-gram of `lookahead`, the one that it drafts included.
    lookahead_pool_size: how many n-grams `lookahead` keeps of a sequence; the oldest go first.
    first: a lookup that drafts before `draft_model` does, and spares it the sequences for which it
        finds a draft of full length.
    fallback: a lookup that drafts where `draft_model` has nothing: while its worker is away, while
        it catches up with a sequence, and beyond max_model_len.
    model: the draft model of `draft_model`, named as the target is; None takes the target itself,
        which then should be quantized. Its vocabulary may be another one (`specdec.text.vocab_map`).
    quantization: how the draft model's matrices are held; None leaves them in the model's dtype.
    draft_tensor_parallel_size: ranks that share the draft model.
    max_model_len: longest sequence to draft for, in tokens; None takes the draft model's own limit.
    draft_confidence_threshold: `draft_model` ends a draft where no token has this probability of
        being the next one; 0 for never.
    speculation_threshold: largest number of decoding requests to draft for, until an operator says
        otherwise; None for 32, or 256 where the policy is goodput, which sees for itself.
    policy: what decides below the threshold (`specdec.speculation.policy.policy`): goodput; table, by the rows
        below; threshold for nothing further. None takes table where there are rows, else goodput.
    num_speculative_tokens_per_batch_size: rows of `BatchSizeTable`, of policy table; none of them
        goes beyond num_speculative_tokens.
    verifier, typical_epsilon, typical_delta, acceptance_threshold, scale_draft_temperature: as in
        SpeculationOptions, for requests that leave them out. A lossy verifier here makes every such
        request lossy; each answer says so.
    allowed_verifiers: what requests may name; `verifier` has to be among them.
    """

    method: SpeculationMethod = "ngram"
    num_speculative_tokens: int = 3
    adaptive_length: bool = False
    adaptive_length_min: int = LengthRule.min_tokens
    adaptive_length_max: int = LengthRule.max_tokens
    adaptive_length_raise_above: float = LengthRule.raise_above
    adaptive_length_lower_below: float = LengthRule.lower_below
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    lookahead_window_size: int = 3
    lookahead_ngram_size: int = 4
    lookahead_pool_size: int = 2048
    first: LookupMethod | None = None
    fallback: LookupMethod | None = None
    model: str | None = None
    quantization: QuantizationMethod | None = None
    draft_tensor_parallel_size: int = 1
    max_model_len: int | None = None
    draft_confidence_threshold: float = 0.0
    speculation_threshold: int | None = None
    policy: PolicyName | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    verifier: VerifierName = "coupled"
    typical_epsilon: float = DEFAULT_TYPICAL_EPSILON
    typical_delta: float = DEFAULT_TYPICAL_DELTA
    acceptance_threshold: AcceptanceThreshold = "auto"
    scale_draft_temperature: bool = False
    allowed_verifiers: tuple[VerifierName, ...] = VERIFIERS

    def __post_init__(self) -> None:
        if self.method not in SPECULATION_METHODS:
            limit = f"one of {', '.join(SPECULATION_METHODS)}"
            raise InvalidValueError("speculative_config.method", self.method, limit)
        require_range(
            "speculative_config.num_speculative_tokens",
            self.num_speculative_tokens,
            1,
            MAX_NUM_SPECULATIVE_TOKENS,
        )
        require_range("speculative_config.prompt_lookup_min", self.prompt_lookup_min, 1, 16)
        require_range(
            "speculative_config.prompt_lookup_max",
            self.prompt_lookup_max,
            self.prompt_lookup_min,
            16,
        )
        require_range(
            "speculative_config.draft_tensor_parallel_size",
            self.draft_tensor_parallel_size,
            1,
            1024,
        )
        self._check_policy()
        if self.max_model_len is not None:
            require_range("speculative_config.max_model_len", self.max_model_len, 2, 2**24)
        require_quantization(self.quantization, "speculative_config.quantization")
        require_range(
            "speculative_config.draft_confidence_threshold", self.draft_confidence_threshold, 0, 1
        )
        self._check_lengths()
        self._check_verifiers()
        self._check_sizes()
        self._check_combination()
        self._refuse_keys_of_other_methods()

    def _check_policy(self) -> None:
        if self.speculation_threshold is not None:
            name, threshold = "speculative_config.speculation_threshold", self.speculation_threshold
            require_range(name, threshold, 0, MAX_SPECULATION_THRESHOLD)
        if self.policy not in (None, *get_args(PolicyName)):
            limit = f"one of {', '.join(get_args(PolicyName))}, or left out"
            raise InvalidValueError("speculative_config.policy", self.policy, limit)
        rows = self.num_speculative_tokens_per_batch_size
        if bool(rows) != (self.chosen_policy == "table"):
            limit = "given where policy is table, and there alone"
            name = "speculative_config.num_speculative_tokens_per_batch_size"
            raise InvalidValueError(name, rows, limit)
        if rows and BatchSizeTable(rows).most > self.num_speculative_tokens:
            limit = f"rows of at most num_speculative_tokens ({self.num_speculative_tokens})"
            name = "speculative_config.num_speculative_tokens_per_batch_size"
            raise InvalidValueError(name, rows, limit)

    def _check_lengths(self) -> None:
        rule = self._length_rule
        if not self.adaptive_length:
            for name, value in asdict(rule).items():
                if value != getattr(LengthRule, name):
                    field = f"speculative_config.adaptive_length_{name.removesuffix('_tokens')}"
                    raise InvalidValueError(field, value, "left out unless adaptive_length is true")
            return
        require_range(
            "speculative_config.num_speculative_tokens",
            self.num_speculative_tokens,
            rule.min_tokens,
            rule.max_tokens,
        )

    def _check_verifiers(self) -> None:
        try:
            SpeculationOptions(
                verifier=self.verifier,
                typical_epsilon=self.typical_epsilon,
                typical_delta=self.typical_delta,
                acceptance_threshold=self.acceptance_threshold,
            )
        except InvalidValueError as error:
            field = error.field.replace("speculation.", "speculative_config.")
            raise InvalidValueError(field, error.value, error.limit) from None
        for index, name in enumerate(self.allowed_verifiers):
            if name not in VERIFIERS:
                limit = f"one of {', '.join(VERIFIERS)}"
                raise InvalidValueError(
                    f"speculative_config.allowed_verifiers[{index}]", name, limit
                )
        if self.verifier not in self.allowed_verifiers:
            limit = f"one of allowed_verifiers: {', '.join(self.allowed_verifiers)}"
            raise InvalidValueError("speculative_config.verifier", self.verifier, limit)

    def _check_sizes(self) -> None:
        ranges: Mapping[str, tuple[float, float]] = {
            "suffix_decoding_max_tree_depth": (2, 256),
            "suffix_decoding_max_cached_requests": (0, 10_000_000),
            "suffix_decoding_max_spec_factor": (0.01, 32),
            "suffix_decoding_min_token_prob": (0, 1),
            "lookahead_window_size": (1, 64),
            "lookahead_ngram_size": (2, 16),
            "lookahead_pool_size": (1, 65_536),
        }
        for name, (low, high) in ranges.items():
            require_range(f"speculative_config.{name}", getattr(self, name), low, high)

    def _check_combination(self) -> None:
        lookups = get_args(LookupMethod)
        for name in ("first", "fallback"):
            if getattr(self, name) not in (None, *lookups):
                limit = f"one of {', '.join(lookups)}, which need no pass of a model, or left out"
                raise InvalidValueError(f"speculative_config.{name}", getattr(self, name), limit)
        if self.fallback is not None and self.fallback == self.first:
            limit = "another than first, which has been asked before"
            raise InvalidValueError("speculative_config.fallback", self.fallback, limit)

    def _refuse_keys_of_other_methods(self) -> None:
        """Rather than ignore them: who gives them expects something of them."""
        defaults = {field.name: field.default for field in fields(self)}
        lookups = get_args(LookupMethod)
        for method, names in _KEYS_OF_METHODS.items():
            for name in names:
                value = getattr(self, name)
                if method not in self.methods and value != defaults[name]:
                    where = "method, first or fallback" if method in lookups else "method"
                    limit = f"left out unless {where} is {method}"
                    raise InvalidValueError(f"speculative_config.{name}", value, limit)

    @property
    def methods(self) -> tuple[SpeculationMethod, ...]:
        """What drafts, in the order in which it is asked."""
        return tuple(each for each in (self.first, self.method, self.fallback) if each is not None)

    @property
    def length_rule(self) -> LengthRule | None:
        """What a sequence's draft length follows; None where all are the same."""
        return self._length_rule if self.adaptive_length else None

    @property
    def _length_rule(self) -> LengthRule:
        return LengthRule(
            min_tokens=self.adaptive_length_min,
            max_tokens=self.adaptive_length_max,
            raise_above=self.adaptive_length_raise_above,
            lower_below=self.adaptive_length_lower_below,
        )

    @property
    def control(self) -> SpeculationControl:
        """What is in force until an operator says otherwise."""
        is_goodput = self.chosen_policy == "goodput"
        default = DEFAULT_GOODPUT_THRESHOLD if is_goodput else DEFAULT_SPECULATION_THRESHOLD
        threshold = default if self.speculation_threshold is None else self.speculation_threshold
        return SpeculationControl(
            "auto",
            threshold,
            self.num_speculative_tokens,
            allowed_verifiers=self.allowed_verifiers,
        )

    @property
    def chosen_policy(self) -> PolicyName:
        """`policy`, or what it stands for where it is left out."""
        if self.policy is not None:
            return self.policy
        return "table" if self.num_speculative_tokens_per_batch_size else "goodput"

    @property
    def batch_size_table(self) -> BatchSizeTable | None:
        """The rows of policy table; None of another."""
        rows = self.num_speculative_tokens_per_batch_size
        return BatchSizeTable(rows) if rows else None
