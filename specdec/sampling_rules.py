"""How a worker draws the tokens of one sequence, with nothing left open."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specdec.model_config import ModelConfig
from specdec.sampling_params import (
    ACCEPTANCE_PRESETS,
    SamplingParams,
    SpeculationOptions,
    VerifierName,
)
from specdec.tokenizer import Tokenizer, check_token_ids

DEFAULT_TYPICAL_EPSILON = 0.09
DEFAULT_TYPICAL_DELTA = 0.3


@dataclass(frozen=True)
class Verifier:
    """What decides which draft tokens are kept; see SpeculationOptions for its parameters."""

    name: VerifierName = "coupled"
    epsilon: float = DEFAULT_TYPICAL_EPSILON
    delta: float = DEFAULT_TYPICAL_DELTA
    threshold: float = ACCEPTANCE_PRESETS["strict"]

    @property
    def needs_draft_probs(self) -> bool:
        """Whether it has to know how likely each draft token was to be drafted."""
        return self.name in ("rejection", "block")


@dataclass(frozen=True)
class SamplingRules:
    """SamplingParams as the workers need them: token ids for texts, values for defaults.

    bad_words: sequences of tokens of which the last must not follow the others.
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
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens came before, and how often."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @cached_property
    def needs_tokens(self) -> bool:
        """Whether the worker has to know the sequence's tokens, those in cached blocks included."""
        return self.has_penalties or bool(self.bad_words) or self.prompt_logprobs is not None


def resolve(
    params: SamplingParams, seed: int, choice: int, model: ModelConfig, tokenizer: Tokenizer
) -> SamplingRules:
    """The rules of one choice. Raises InvalidValueError for a token that the model has not."""
    _check_tokens(params, model.vocab_size)
    settled = params.settled(model.sampling_defaults)
    return SamplingRules(
        temperature=settled.temperature,
        top_p=settled.top_p,
        top_k=settled.top_k,
        min_p=settled.min_p,
        seed=seed,
        choice=choice,
        repetition_penalty=settled.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        bad_words=_bad_words(params, tokenizer),
        allowed_token_ids=params.allowed_token_ids,
        # Where there is a grammar, its masks see to it: they know when nothing but an end may come.
        min_tokens=params.min_tokens if params.structured_output is None else 0,
        end_token_ids=_end_tokens(params, model),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        verifier=_verifier(params.speculation),
        scale_draft_temperature=params.speculation.scale_draft_temperature is True,
    )


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    check_token_ids("logit_bias", tuple(params.logit_bias), vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _bad_words(params: SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the beginning of a text and after a space."""
    spellings = (text for word in params.bad_words for text in (word, f" {word.lstrip()}"))
    encoded = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))


def _end_tokens(params: SamplingParams, model: ModelConfig) -> tuple[int, ...]:
    return tuple(sorted(model.eos_token_ids | set(params.stop_token_ids)))


def _verifier(options: SpeculationOptions) -> Verifier:
    del options
    return Verifier()
