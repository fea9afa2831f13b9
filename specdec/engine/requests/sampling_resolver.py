"""Resolves sampling parameters and service defaults to the sampling rules of a sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.config.model_config import ModelConfig
from specdec.text.tokenizer import Tokenizer, check_token_ids
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import (
    ACCEPTANCE_PRESETS,
    AcceptancePreset,
    SamplingParams,
    VerifierName,
)
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier

MAX_CHARS = 4096
"""Length of the end of a prompt that `preset_for` searches."""

# A code fence, or a line that is rare in prose: a definition, an import, an include, or one that
# ends in a semicolon or an opening brace after a bracket.
_CODE = re.compile(
    r"""```
    | ^[ \t]*(?:async[ \t]+)?(?:def|fn|func|function)[ \t]+\w+[ \t]*[(<]
    | ^[ \t]*class[ \t]+\w+[ \t]*(?:\([\w., ]*\)[ \t]*)?[:{]
    | ^[ \t]*from[ \t]+[\w.]+[ \t]+import[ \t]
    | ^[ \t]*import[ \t]+[\w.]+(?:[ \t]+as[ \t]+\w+|;)?[ \t]*$
    | ^[ \t]*\#include[ \t]*[<"]
    | ^[ \t]*(?:const|let|var)[ \t]+\w+[ \t]*=
    | [)\]}][ \t]*(?:;|\{)[ \t]*$
    """,
    re.MULTILINE | re.VERBOSE,
)


def preset_for(prompt: str, *, is_structured: bool) -> AcceptancePreset:
    """Return medium for structured output, strict for a prompt with code, lenient for other text.

    Only the last MAX_CHARS characters of the prompt are searched. A question about code that
    contains none counts as other text.
    """
    if is_structured:
        return "medium"
    return "strict" if _CODE.search(prompt[-MAX_CHARS:]) else "lenient"


_Value = TypeVar("_Value")

_NO_SERVICE = SpeculativeConfig()
"""Defaults of the speculation options where nothing drafts."""


def resolve(
    params: SamplingParams,
    seed: int,
    model: ModelConfig,
    tokenizer: Tokenizer,
    service: SpeculativeConfig | None = None,
    prompt: Sequence[int] = (),
    allowed_verifiers: Sequence[VerifierName] | None = None,
    *,
    allow_override: bool = True,
) -> SamplingRules:
    """Return the rules of choice 0. Raises InvalidValueError.

    service: the defaults of the speculation options. prompt: token ids, from which the acceptance
    threshold `auto` is resolved. allowed_verifiers: None for those of the service.
    allow_override: whether the request's draft_confidence_threshold applies.
    """
    _check_tokens(params, model.vocab_size)
    service, options = service or _NO_SERVICE, params.speculation
    return _rules(
        params,
        seed,
        model,
        tokenizer,
        verifier=_verifier(params, service, prompt, tokenizer, allowed_verifiers),
        scale_draft_temperature=_first(
            options.scale_draft_temperature, service.scale_draft_temperature
        ),
        draft_confidence_threshold=options.draft_confidence_threshold if allow_override else None,
    )


def _rules(
    params: SamplingParams, seed: int, model: ModelConfig, tokenizer: Tokenizer, **drafts: Any
) -> SamplingRules:
    """Return the rules by which the target selects tokens, with `drafts`, the fields of drafts."""
    settled = params.resolved(model.sampling_defaults)
    allowed_tokens = params.allowed_token_ids
    rules = object.__new__(SamplingRules)  # the constructor takes 7 us more
    rules.__dict__.update(
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
        allowed_token_ids=None if allowed_tokens is None else tuple(sorted(set(allowed_tokens))),
        # With a grammar its masks enforce min_tokens: they know when only an end token may follow.
        min_tokens=params.min_tokens if params.structured_output is None else 0,
        end_token_ids=tuple(sorted(model.eos_token_ids | _stop_tokens(params, model.vocab_size))),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logprob_token_ids=params.logprob_token_ids,
        **drafts,
    )
    return rules


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    num_allowed = len(params.allowed_token_ids or ())
    if num_allowed > vocab_size:
        limit = f"at most {vocab_size} (the size of the vocabulary)"
        raise InvalidValueError("allowed_token_ids length", num_allowed, limit)
    check_token_ids("logit_bias.keys", tuple(params.logit_bias), vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_ids("logprob_token_ids", params.logprob_token_ids, vocab_size)


def _stop_tokens(params: SamplingParams, vocab_size: int) -> set[int]:
    """Return the stop tokens; ids outside the vocabulary, which never come, are left out."""
    return {each for each in params.stop_token_ids if 0 <= each < vocab_size}


def _bad_words(params: SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, as at the start of a text and as after a space."""
    if not params.bad_words:
        return ()
    spellings = (text for word in params.bad_words for text in (word, f" {word.lstrip()}"))
    encoded = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))


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
        threshold = "strict"
        if name in ("threshold", "confidence"):
            text = tokenizer.decode(prompt[-MAX_CHARS:])  # most tokens have at least one character
            threshold = preset_for(text, is_structured=params.structured_output is not None)
    return _make_verifier(
        name=name,
        epsilon=_first(options.typical_epsilon, service.typical_epsilon),
        delta=_first(options.typical_delta, service.typical_delta),
        threshold=threshold if not isinstance(threshold, str) else ACCEPTANCE_PRESETS[threshold],
        synthetic_rates=service.synthetic_rates if name == "synthetic" else (),
    )


_make_verifier = lru_cache(maxsize=128)(Verifier)  # requests share few of them


def _first(requested: _Value | None, default: _Value) -> _Value:
    return default if requested is None else requested
