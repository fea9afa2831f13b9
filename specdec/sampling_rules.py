"""How a worker draws the tokens of one sequence, with nothing left open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from specdec.acceptance_preset import MAX_CHARS, preset_for
from specdec.errors import InvalidValueError
from specdec.model_config import ModelConfig
from specdec.sampling_params import (
    ACCEPTANCE_PRESETS,
    LOSSY_VERIFIERS,
    AcceptancePreset,
    SamplingParams,
    VerifierName,
)
from specdec.speculative_config import (
    DEFAULT_TYPICAL_DELTA,
    DEFAULT_TYPICAL_EPSILON,
    SpeculativeConfig,
)
from specdec.tokenizer import Tokenizer, check_token_ids

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Verifier:
    """What decides which draft tokens are kept; see SpeculationOptions for its parameters."""

    name: VerifierName = "coupled"
    epsilon: float = DEFAULT_TYPICAL_EPSILON
    delta: float = DEFAULT_TYPICAL_DELTA
    threshold: float = ACCEPTANCE_PRESETS["strict"]


@dataclass(frozen=True)
class SamplingRules:
    """SamplingParams as the workers need them: token ids for texts, values for defaults.

    bad_words: sequences of tokens of which the last must not follow the others.
    allowed_token_ids: each once, in ascending order; None allows all.
    end_token_ids: what must not be drawn before min_tokens.
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
    verifier: Verifier = Verifier()
    scale_draft_temperature: bool = False

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the best tokens decide everything: the lossless verifiers are then all one."""
        return self.temperature == 0 and self.verifier.name not in LOSSY_VERIFIERS

    @cached_property
    def acting_verifier(self) -> VerifierName:
        """What judges the drafts."""
        return "coupled" if self.is_greedy else self.verifier.name

    @cached_property
    def needs_draft_probs(self) -> bool:
        """Whether drafts have to come with the distributions that they were drawn from."""
        return self.acting_verifier in ("rejection", "block")

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens came before, and how often."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @cached_property
    def needs_tokens(self) -> bool:
        """Whether the worker has to know the sequence's tokens, those in cached blocks included."""
        return self.has_penalties or bool(self.bad_words) or self.prompt_logprobs is not None

    @property
    def without_tokens(self) -> SamplingRules:
        """What is left where no token can be told apart: temperature and cuts."""
        return SamplingRules(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            choice=self.choice,
            verifier=self.verifier,
            scale_draft_temperature=self.scale_draft_temperature,
        )

    def of_choice(self, choice: int) -> SamplingRules:
        """Those of another choice: log-probabilities of the prompt come with choice 0 alone."""
        return replace(self, choice=choice, prompt_logprobs=None)


def resolve(
    params: SamplingParams,
    seed: int,
    model: ModelConfig,
    tokenizer: Tokenizer,
    service: SpeculativeConfig | None = None,
    prompt: Sequence[int] = (),
) -> SamplingRules:
    """The rules of choice 0. Raises InvalidValueError for a token that the model has not.

    service: what holds where the request does not say how to speculate. prompt: token ids, by which
    the acceptance threshold `auto` is settled. Raises InvalidValueError for a verifier that the
    service does not allow.
    """
    _check_tokens(params, model.vocab_size)
    settled = params.settled(model.sampling_defaults)
    return SamplingRules(
        temperature=settled.temperature,
        top_p=settled.top_p,
        top_k=settled.top_k,
        min_p=settled.min_p,
        seed=seed,
        repetition_penalty=settled.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        bad_words=_bad_words(params, tokenizer),
        allowed_token_ids=_allowed_tokens(params),
        # Where there is a grammar, its masks see to it: they know when nothing but an end may come.
        min_tokens=params.min_tokens if params.structured_output is None else 0,
        end_token_ids=_end_tokens(params, model),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        verifier=_verifier(params, service or SpeculativeConfig(), prompt, tokenizer),
        scale_draft_temperature=_scales_draft_temperature(params, service),
    )


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    num_allowed = len(params.allowed_token_ids or ())
    if num_allowed > vocab_size:
        limit = f"at most {vocab_size} (the size of the vocabulary)"
        raise InvalidValueError("allowed_token_ids length", num_allowed, limit)
    check_token_ids("logit_bias.keys", tuple(params.logit_bias), vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _bad_words(params: SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the beginning of a text and after a space."""
    spellings = (text for word in params.bad_words for text in (word, f" {word.lstrip()}"))
    encoded = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))


def _allowed_tokens(params: SamplingParams) -> tuple[int, ...] | None:
    allowed = params.allowed_token_ids
    return None if allowed is None else tuple(sorted(set(allowed)))


def _end_tokens(params: SamplingParams, model: ModelConfig) -> tuple[int, ...]:
    return tuple(sorted(model.eos_token_ids | set(params.stop_token_ids)))


def _verifier(
    params: SamplingParams, service: SpeculativeConfig, prompt: Sequence[int], tokenizer: Tokenizer
) -> Verifier:
    options = params.speculation
    name = options.verifier or service.verifier
    if name not in service.allowed_verifiers:
        limit = f"what the service allows: {', '.join(service.allowed_verifiers)}"
        raise InvalidValueError("speculation.verifier", name, limit)
    threshold = _first(options.acceptance_threshold, service.acceptance_threshold)
    if threshold == "auto":
        threshold = _preset(params, prompt, tokenizer) if name == "threshold" else "strict"
    return Verifier(
        name=name,
        epsilon=_first(options.typical_epsilon, service.typical_epsilon),
        delta=_first(options.typical_delta, service.typical_delta),
        threshold=threshold if not isinstance(threshold, str) else ACCEPTANCE_PRESETS[threshold],
    )


def _preset(
    params: SamplingParams, prompt: Sequence[int], tokenizer: Tokenizer
) -> AcceptancePreset:
    text = tokenizer.decode(prompt[-MAX_CHARS:])  # a token has a character or more, mostly
    return preset_for(text, is_structured=params.structured_output is not None)


def _scales_draft_temperature(params: SamplingParams, service: SpeculativeConfig | None) -> bool:
    asked = params.speculation.scale_draft_temperature
    return _first(asked, service is not None and service.scale_draft_temperature)


def _first(asked: _Value | None, default: _Value) -> _Value:
    return default if asked is None else asked
