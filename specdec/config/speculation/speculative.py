"""Configuration of drafting and verification, which requests and operators may override."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from specdec.config.fields import refuse_unknown
from specdec.config.speculation.head_methods import HeadMethodConfig, tree_defaults
from specdec.config.speculation.method_config import DraftPlace, MethodConfig
from specdec.config.speculation.method_roles import (
    OTHER_ROLES,
    check_roles,
    default_method,
    read_roles,
    role_mapping,
)
from specdec.config.speculation.methods import METHODS, DraftModelConfig, NgramConfig, keys_of
from specdec.config.speculation.speculative_checks import (
    DEFAULT_BATCH_BUDGET_MAX,
    check_adaptive_length,
    check_budget,
    check_options,
    check_policy,
    check_schedule,
    check_tree_choices,
    check_tree_size,
    require_tree_drafter,
)
from specdec.config.speculation.synthetic_acceptance import SyntheticAcceptance
from specdec.types.control import MAX_SPECULATION_THRESHOLD, SpeculationControl
from specdec.types.drafts.draft_decision import DraftAhead
from specdec.types.drafts.draft_length import LengthRule, LengthSchedule
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import (
    DEFAULT_TYPICAL_DELTA,
    DEFAULT_TYPICAL_EPSILON,
    MAX_NUM_SPECULATIVE_TOKENS,
    SERVED_VERIFIERS,
    VERIFIERS,
    AcceptanceThreshold,
    VerifierName,
)
from specdec.types.validation import require_choice, require_range

PolicyName = Literal["threshold", "table", "goodput"]

DEFAULT_SPECULATION_THRESHOLD = 32
DEFAULT_GOODPUT_THRESHOLD = 256
"""Goodput turns drafts off by itself; this bound is for loads beyond its estimates."""

_NO_KEYS = ("left_out", "drafter", "first", "fallback")
"""Fields that are not read from keys of the same name."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafting methods, and what applies whichever of them drafts.

    drafter: the method and its own keys (`specdec.config.speculation.methods`).
    num_speculative_tokens: draft tokens for each sequence in a step.
    num_draft_tree_tokens: those of a tree, of depth num_speculative_tokens; policy goodput chooses
        among it, smaller ones and chains. 0: chains only. With medusa_choices it is their number.
    first: a method that drafts before `drafter`, which then leaves out the sequences for which it
        has a draft (a lookup, if `drafter` is a model: a draft of full length). A head drafts for
        all; the longer draft is verified.
    fallback: a method that drafts where `drafter` has nothing: while its worker is down, while it
        catches up with a sequence, and beyond its max_model_len, or where a lookup finds no match.
    adaptive_length: whether each sequence's draft length follows its own acceptance, for
        requests that give no number. It starts with num_speculative_tokens.
    adaptive_length_min, adaptive_length_max, adaptive_length_raise_above,
        adaptive_length_lower_below: as in LengthRule.
    batch_budget: whether the draft tokens of a step are divided over its sequences by expected
        survival (`types.drafts.draft_survival`) with the sum of equal numbers. A head that is the
        only drafter adds its confidences. None: policy goodput may leave out some of chains.
    batch_budget_max: longest draft of a sequence with batch_budget.
    speculation_threshold: largest number of decoding requests to draft for, until an operator
        changes it; None for 32, or 256 with policy goodput, which measures the effect of the load.
    policy: what decides below the threshold (`specdec.speculation.policy.policy`): goodput; table,
        by the rows below; threshold for nothing further. None takes table where there are rows,
        else goodput.
    num_speculative_tokens_per_batch_size: rows of `LengthSchedule`, for policy table; none of them
        exceeds num_speculative_tokens.
    verifier, typical_epsilon, typical_delta, acceptance_threshold, scale_draft_temperature: as in
        SpeculationOptions, for requests that leave them out. A lossy verifier here makes every such
        request lossy; each response reports it.
    allowed_verifiers: those that requests may name, with `verifier` among them. By default all but
        `synthetic`, which joins them where it is `verifier`.
    synthetic_acceptance_rate, ..._rates, ..._length: as in SyntheticAcceptance.
    left_out: `method` and `num_speculative_tokens`, where they were not given: the files of the
        model may decide them (`engine.models.model_detection`). `drafter`, where nothing was given
        and the model has several: the machine decides (`specdec.llm.drafter_choice`).
    """

    drafter: MethodConfig = NgramConfig()  # noqa: RUF009
    num_speculative_tokens: int = 3
    num_draft_tree_tokens: int = 0
    first: MethodConfig | None = None
    fallback: MethodConfig | None = None
    adaptive_length: bool = False
    adaptive_length_min: int = LengthRule.min_tokens
    adaptive_length_max: int = LengthRule.max_tokens
    adaptive_length_raise_above: float = LengthRule.raise_above
    adaptive_length_lower_below: float = LengthRule.lower_below
    batch_budget: bool | None = None
    batch_budget_max: int = DEFAULT_BATCH_BUDGET_MAX
    speculation_threshold: int | None = None
    policy: PolicyName | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    verifier: VerifierName = "coupled"
    typical_epsilon: float = DEFAULT_TYPICAL_EPSILON
    typical_delta: float = DEFAULT_TYPICAL_DELTA
    acceptance_threshold: AcceptanceThreshold = "auto"
    scale_draft_temperature: bool = False
    allowed_verifiers: tuple[VerifierName, ...] = SERVED_VERIFIERS
    synthetic_acceptance_rate: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] = ()
    synthetic_acceptance_length: float | None = None
    left_out: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def of(
        cls, method: str | None = None, num_speculative_tokens: int | None = None, **keys: Any
    ) -> SpeculativeConfig:
        """Return the configuration of flat keys, as they stand in a configuration file.

        method: None for draft_model if there is a model for it, else ngram; the model's files may
        decide otherwise. first, fallback: as in `specdec.config.speculation.method_roles`. Raise
        InvalidValueError, also for a key that is unknown, or belongs to a method that is not loaded
        and differs from its default.
        """
        may_follow = {"method": method, "num_speculative_tokens": num_speculative_tokens}
        left_out = frozenset(name for name, value in may_follow.items() if value is None)
        method = default_method(keys) if method is None else method
        given = {"method": method, **{role: keys.pop(role, None) for role in OTHER_ROLES}}
        refuse_unknown("speculative_config key", keys, key_types())
        if keys.get("verifier") == "synthetic":
            keys.setdefault("allowed_verifiers", VERIFIERS)
        common = {name: keys.pop(name) for name in _COMMON_KEYS if name in keys}
        if num_speculative_tokens is not None:
            common["num_speculative_tokens"] = num_speculative_tokens
        roles = read_roles(given, keys)
        common = {**tree_defaults(roles.values()), **common}
        return cls(drafter=roles.pop("method"), left_out=left_out, **roles, **common)  # type: ignore[arg-type]

    def to_mapping(self) -> dict[str, Any]:
        """Return the keys that `of` reads, without those that were left out."""
        mapping = role_mapping(self._roles) | {name: getattr(self, name) for name in _COMMON_KEYS}
        return {name: value for name, value in mapping.items() if name not in self.left_out}

    def with_method(self, method: str, **keys: Any) -> SpeculativeConfig:
        """Return the configuration with the method that its files were found to be for.

        keys: to change. Raise InvalidValueError for a key that this method does not have.
        """
        return SpeculativeConfig.of(**{**self.to_mapping(), "method": method, **keys})

    @property
    def _roles(self) -> dict[str, MethodConfig]:
        roles = {"method": self.drafter, "first": self.first, "fallback": self.fallback}
        return {role: each for role, each in roles.items() if each is not None}

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        name = "speculative_config.num_speculative_tokens"
        require_range(name, count, 1, MAX_NUM_SPECULATIVE_TOKENS)
        self._check_trees()
        self._check_policy()
        self._check_lengths()
        self._check_verifiers()
        self._check_roles()

    def _check_roles(self) -> None:
        roles = self._roles
        if self._awaits_method:
            del roles["method"]
        check_roles(roles)

    @property
    def _awaits_method(self) -> bool:
        """Return whether a model's files will give the method, which is checked then."""
        return "method" in self.left_out and isinstance(self.drafter, DraftModelConfig)

    def _check_trees(self) -> None:
        num_tokens, count = self.num_speculative_tokens, self.num_draft_tree_tokens
        check_tree_choices(self.head.tree_choices if self.head else (), count, num_tokens)
        if count == 0:
            return
        if not self._awaits_method:
            require_tree_drafter(count, self.drafters)
        is_table, has_budget = self.chosen_policy == "table", self.batch_budget is True
        check_tree_size(count, num_tokens, is_table=is_table, has_budget=has_budget)

    def _check_policy(self) -> None:
        name, threshold = "speculative_config.speculation_threshold", self.speculation_threshold
        require_range(name, threshold, 0, MAX_SPECULATION_THRESHOLD)
        check_policy(self.policy, get_args(PolicyName))
        rows, is_table = self.num_speculative_tokens_per_batch_size, self.chosen_policy == "table"
        check_schedule(rows, self.num_speculative_tokens, is_wanted=is_table)

    def _check_lengths(self) -> None:
        count, is_adaptive = self.num_speculative_tokens, self.adaptive_length
        check_adaptive_length(self._length_rule, count, is_wanted=is_adaptive)
        if self.batch_budget and is_adaptive:
            limit = "left out where adaptive_length is true, which sets each sequence's own number"
            raise InvalidValueError("speculative_config.batch_budget", True, limit)
        check_budget(self.batch_budget_max, count, is_wanted=self.batch_budget is True)

    def _check_verifiers(self) -> None:
        check_options(
            verifier=self.verifier,
            typical_epsilon=self.typical_epsilon,
            typical_delta=self.typical_delta,
            acceptance_threshold=self.acceptance_threshold,
        )
        self.require_allowed(self.allowed_verifiers)
        self._synthetic_acceptance.check(self.allowed_verifiers)

    def require_allowed(self, names: Sequence[VerifierName]) -> None:
        """Raise InvalidValueError unless `names` are verifiers that include the default one."""
        for index, name in enumerate(names):
            require_choice(f"speculative_config.allowed_verifiers[{index}]", name, VERIFIERS)
        if self.verifier not in names:
            limit = f"one of allowed_verifiers: {', '.join(names)}"
            raise InvalidValueError("speculative_config.verifier", self.verifier, limit)

    @property
    def is_auto(self) -> bool:
        """Return whether the fastest drafter of the model may replace `drafter`."""
        return "drafter" in self.left_out

    @property
    def method(self) -> str:
        """The name of `drafter`."""
        return self.drafter.name

    @property
    def drafters(self) -> tuple[MethodConfig, ...]:
        """All methods, in the order in which they draft."""
        chosen = (self.first, self.drafter, self.fallback)
        return tuple(each for each in chosen if each is not None)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of `drafters`."""
        return tuple(each.name for each in self.drafters)

    @property
    def draft_model(self) -> DraftModelConfig | None:
        """The method that runs a draft worker, where one does."""
        models = (each for each in self.drafters if isinstance(each, DraftModelConfig))
        return next(models, None)

    @property
    def draft_ahead(self) -> DraftAhead:
        """What a draft model drafts while the target runs, where no policy chooses."""
        return self.ahead_choices[-1]

    @property
    def ahead_choices(self) -> tuple[DraftAhead, ...]:
        """What a policy may have a draft model draft while the target runs, the most last."""
        mode = "off" if self.draft_model is None else self.draft_model.async_drafting
        if mode == "auto":
            return tuple(DraftAhead)
        return (DraftAhead.OFF,) if mode == "off" else (DraftAhead.OFF, DraftAhead(mode))

    @property
    def without_drafts_ahead(self) -> SpeculativeConfig:
        """The configuration with async_drafting off, as where nothing overlaps."""
        model = self.draft_model
        return self if not model else self.replacing(model, replace(model, async_drafting="off"))

    def replacing(self, drafter: MethodConfig, other: MethodConfig) -> SpeculativeConfig:
        """Return the configuration with `other` in the place of one of its methods."""
        roles = ("drafter", "first", "fallback")
        replaced: dict[str, Any] = {role: other for role in roles if getattr(self, role) == drafter}
        return replace(self, **replaced)

    @property
    def head(self) -> HeadMethodConfig | None:
        """The method that drafts with a head on the target's ranks, where one does."""
        return next((each for each in self.drafters if isinstance(each, HeadMethodConfig)), None)

    @property
    def rank_drafters(self) -> tuple[MethodConfig, ...]:
        """The methods by which the target's ranks draft: a head, lookups, or both."""
        return tuple(each for each in self.drafters if each.place is DraftPlace.TARGET)

    @property
    def uses_confidences(self) -> bool:
        """Return whether a head's confidences divide the budget; the head is the only drafter."""
        return self.batch_budget is True and self.drafters == (self.head,)

    @property
    def divides_slots(self) -> bool:
        """Return whether the policy may leave out draft tokens of single sequences."""
        return self.batch_budget is None and not self.adaptive_length

    @property
    def holds_drafts(self) -> bool:
        """Return whether the target's ranks hold drafts for a step begun ahead.

        They do where they alone draft. How many drafts to verify must be known too, and
        confidences arrive with the drafts.
        """
        return self.drafters == self.rank_drafters and not self.uses_confidences

    @property
    def num_lookahead_tokens(self) -> int:
        """Most guesses that the target runs in a step after a sequence's drafts."""
        return max(each.num_lookahead_tokens for each in self.drafters)

    @property
    def max_chain_tokens(self) -> int:
        """Most tokens of a chain of drafts, unless a request asks for more."""
        return max(self.num_speculative_tokens, self.adaptive_length * self.adaptive_length_max)

    @property
    def max_row_guesses(self) -> int:
        """Most guesses of a row, likewise."""
        return max(self.max_chain_guesses, self.num_draft_tree_tokens)

    @property
    def max_chain_guesses(self) -> int:
        """Most guesses of a row of a chain of drafts, likewise."""
        longest = self.batch_budget_max if self.batch_budget else 0
        return max(self.max_chain_tokens, longest) + self.num_lookahead_tokens

    @property
    def length_rule(self) -> LengthRule | None:
        """Return how a sequence's draft length follows its acceptance; None for a fixed length."""
        rule = replace(self._length_rule, configured=self.num_speculative_tokens)
        return rule if self.adaptive_length else None

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """The rates of `Verifier`; none unless `synthetic` is allowed."""
        return self._synthetic_acceptance.conditional_rates

    @property
    def _synthetic_acceptance(self) -> SyntheticAcceptance:
        return SyntheticAcceptance(
            self.num_speculative_tokens,
            self.synthetic_acceptance_rate,
            self.synthetic_acceptance_rates,
            self.synthetic_acceptance_length,
        )

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
        """The settings that apply until an operator changes them."""
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
        """`policy`, or its default where it is left out."""
        has_table = bool(self.num_speculative_tokens_per_batch_size)
        return self.policy or ("table" if has_table else "goodput")

    @property
    def length_schedule(self) -> LengthSchedule | None:
        """The rows of policy table; None for the other policies."""
        rows = self.num_speculative_tokens_per_batch_size
        return LengthSchedule(rows) if rows else None


@cache
def key_types() -> Mapping[str, Any]:
    """Return the type of each key of speculative_config, those of all methods included."""
    name: Any = Literal.__getitem__(tuple(METHODS))  # names that are known at run time only
    types = {"method": name, "first": name | None, "fallback": name | None, **_COMMON_KEYS}
    for config_class in METHODS.values():
        hints = get_type_hints(config_class)
        types |= {key: hints[key] for key in keys_of(config_class)}
    return types


_COMMON_KEYS: Mapping[str, Any] = {
    name: hint for name, hint in get_type_hints(SpeculativeConfig).items() if name not in _NO_KEYS
}
"""Types of the keys that are of no method."""
