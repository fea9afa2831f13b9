"""Sampling parameters as the workers receive them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Self, TypeVar, overload

from specdec.types.sampling.sampling_params import (
    ACCEPTANCE_PRESETS,
    DEFAULT_TYPICAL_DELTA,
    DEFAULT_TYPICAL_EPSILON,
    LOSSY_VERIFIERS,
    VerifierName,
)

V = TypeVar("V")


class derived(Generic[V]):  # noqa: N801  # used like `property`
    """Property that is computed once, without the lock of Python 3.11's `cached_property`."""

    def __init__(self, compute: Callable[[Any], V]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> V: ...

    def __get__(self, instance: object | None, owner: type) -> V | Self:
        if instance is None:
            return self
        value = vars(instance)[self._compute.__name__] = self._compute(instance)
        return value


@dataclass(frozen=True)
class Verifier:
    """Verifier of draft tokens; see SpeculationOptions for its parameters.

    synthetic_rates: for verifier `synthetic`, the probability that the draft token of each place is
        accepted if those before it were; 0 beyond.
    """

    name: VerifierName = "coupled"
    epsilon: float = DEFAULT_TYPICAL_EPSILON
    delta: float = DEFAULT_TYPICAL_DELTA
    threshold: float = ACCEPTANCE_PRESETS["strict"]
    synthetic_rates: tuple[float, ...] = ()


class ListedTokens(NamedTuple):
    """Tokens whose log-probabilities a row requests beside that of the token itself."""

    num_best: int  # number of most likely ones
    token_ids: tuple[int, ...] = ()  # further ones, whatever their probability


class Replay(NamedTuple):
    """An earlier output of one choice, to compare with what the model samples at its positions.

    tolerance: of the difference of two logits; a token within it is a tie. grammar_masks: int32
    [len(token_ids), num_words] as bytes, as in StepRow; empty without a grammar.
    """

    token_ids: tuple[int, ...]
    choice: int = 0
    tolerance: float = 1e-3
    grammar_masks: bytes = b""


@dataclass(frozen=True)
class SamplingRules:
    """SamplingParams for the workers: texts replaced by token ids, defaults by values.

    bad_words: token sequences of which the last token must not follow the others.
    allowed_token_ids: each once, in ascending order; None allows all.
    end_token_ids: not drawn before min_tokens.
    logprob_token_ids: listed where logprobs or prompt_logprobs are.
    draft_confidence_threshold: as in SpeculationOptions; None for the draft model's own.
    replay: output that is compared where prompt_logprobs would be computed, and takes their place.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0  # index among the n choices of the request
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    verifier: Verifier = Verifier()
    scale_draft_temperature: bool = False
    draft_confidence_threshold: float | None = None
    replay: Replay | None = None

    @derived
    def is_greedy(self) -> bool:
        """Return whether sampling is an argmax, for which all lossless verifiers are equal."""
        return self.temperature == 0 and self.verifier.name not in LOSSY_VERIFIERS

    @derived
    def acting_verifier(self) -> VerifierName:
        """Name of the verifier in effect."""
        return "coupled" if self.is_greedy else self.verifier.name

    @derived
    def needs_draft_probs(self) -> bool:
        """Return whether drafts need the distributions that they were drawn from."""
        return self.acting_verifier in ("rejection", "block")

    @derived
    def needs_confidences(self) -> bool:
        """Return whether drafts need the draft model's probability of each of their tokens."""
        return self.acting_verifier == "confidence"

    @derived
    def listed_tokens(self) -> ListedTokens | None:
        """Tokens that are listed at each position of the output; None for no log-probabilities."""
        return (
            None if self.logprobs is None else ListedTokens(self.logprobs, self.logprob_token_ids)
        )

    @derived
    def listed_prompt_tokens(self) -> ListedTokens | None:
        """Tokens that are listed at each position of the prompt; None for no log-probabilities."""
        count = self.prompt_logprobs
        return None if count is None else ListedTokens(count, self.logprob_token_ids)

    @derived
    def has_penalties(self) -> bool:
        """Return whether logits depend on the counts of earlier tokens."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @derived
    def needs_tokens(self) -> bool:
        """Return whether the worker needs a sequence's tokens, those in cached blocks included."""
        return self.has_penalties or bool(self.bad_words) or self.prompt_logprobs is not None

    @property
    def without_tokens(self) -> SamplingRules:
        """The rules that do not depend on token ids: temperature and truncation."""
        return SamplingRules(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            choice=self.choice,
            verifier=self.verifier,
            scale_draft_temperature=self.scale_draft_temperature,
            draft_confidence_threshold=self.draft_confidence_threshold,
        )

    def of_choice(self, choice: int) -> SamplingRules:
        """Return the rules of another choice; only choice 0 has log-probabilities of the prompt."""
        return replace(self, choice=choice, prompt_logprobs=None)
