"""How a worker draws the tokens of one sequence, with nothing left open."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from specdec.config.speculative import SpeculativeConfig
from specdec.models.config import ModelConfig
from specdec.text.tokenizer import Tokenizer, check_token_ids
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import (
    ACCEPTANCE_PRESETS,
    AcceptancePreset,
    SamplingParams,
    VerifierName,
)
from specdec.types.sampling_spec import SamplingRules, Verifier

MAX_CHARS = 4096
"""So much of a prompt's end is looked at."""

# A fence, or a line that hardly occurs in prose: a definition, an import, an include, or one that
# ends in a semicolon or an opening brace after a bracket.
_CODE = re.compile(
    r"""```
    | ^[ \t]*(?:async[ \t]+)?(?:def|fn|func|function)[ \t]+\w+[ \t]*[(<]
    | ^[ \t]*class[ \t]+\w+[ \t]*(?:\([\w., ]*\))?[ \t]*[:{]
    | ^[ \t]*from[ \t]+[\w.]+[ \t]+import[ \t]
    | ^[ \t]*import[ \t]+[\w.]+(?:[ \t]+as[ \t]+\w+|;)?[ \t]*$
    | ^[ \t]*\#include[ \t]*[<"]
    | ^[ \t]*(?:const|let|var)[ \t]+\w+[ \t]*=
    | [)\]}][ \t]*(?:;|\{)[ \t]*$
    """,
    re.MULTILINE | re.VERBOSE,
)


def preset_for(prompt: str, *, is_structured: bool) -> AcceptancePreset:
    """Medium for structured output, strict for a prompt with code in it, lenient for other text.

    is_structured: whether the request says what form its output has to have. Of the prompt only the
    last MAX_CHARS characters count. A question about code that shows none is taken for other text.
    """
    if is_structured:
        return "medium"
    return "strict" if _CODE.search(prompt[-MAX_CHARS:]) else "lenient"


_Value = TypeVar("_Value")


def resolve(
    params: SamplingParams,
    seed: int,
    model: ModelConfig,
    tokenizer: Tokenizer,
    service: SpeculativeConfig | None = None,
    prompt: Sequence[int] = (),
    allowed_verifiers: Sequence[VerifierName] | None = None,
) -> SamplingRules:
    """The rules of choice 0. Raises InvalidValueError for a token that the model has not.

    service: what holds where the request does not say how to speculate. prompt: token ids, by which
    the acceptance threshold `auto` is settled. allowed_verifiers: None for those of the service;
    raises InvalidValueError for another verifier.
    """
    _check_tokens(params, model.vocab_size)
    settled = params.resolved(model.sampling_defaults)
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
        verifier=_verifier(
            params, service or SpeculativeConfig(), prompt, tokenizer, allowed_verifiers
        ),
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
    params: SamplingParams,
    service: SpeculativeConfig,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    allowed: Sequence[VerifierName] | None,
) -> Verifier:
    options = params.speculation
    name = options.verifier or service.verifier
    allowed = service.allowed_verifiers if allowed is None else allowed
    if name not in allowed:
        limit = f"what the service allows: {', '.join(allowed)}"
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
