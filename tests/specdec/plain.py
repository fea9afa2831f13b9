"""Reference definition of every output token: row by row, dense, and independent code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from specdec.sampling.gumbel import CHUNK_TOKENS, NoiseKeys, gumbel_noise
from specdec.types.sampling.sampling_spec import SamplingRules

ROUNDING = 1e-4
"""More than differently shaped forward passes in float32 round the logits of tiny models."""


def shape(
    logits: Tensor,  # [vocab_size]
    rules: SamplingRules,
    prompt: Sequence[int],
    output: Sequence[int],
    grammar_mask: np.ndarray | None = None,
) -> Tensor:
    """Everything up to the temperature, as vLLM defines it."""
    shaped = logits.float().numpy().copy()
    for token, bias in rules.logit_bias:
        shaped[token] += np.float32(bias)
    factor = np.float32(rules.repetition_penalty)
    for token in {*prompt, *output}:
        shaped[token] = shaped[token] / factor if shaped[token] > 0 else shaped[token] * factor
    for token, count in Counter(output).items():
        shaped[token] -= np.float32(rules.frequency_penalty * count)
        shaped[token] -= np.float32(rules.presence_penalty)
    shaped[sorted(_forbidden(len(logits), rules, output, grammar_mask))] = -np.inf
    return torch.from_numpy(shaped)


def _forbidden(
    vocab_size: int, rules: SamplingRules, output: Sequence[int], grammar_mask: np.ndarray | None
) -> set[int]:
    everything, forbidden = set(range(vocab_size)), set()
    if rules.allowed_token_ids is not None:
        forbidden |= everything - set(rules.allowed_token_ids)
    for *before, last in rules.bad_words:
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            forbidden.add(last)
    grammatical = everything
    if grammar_mask is not None:
        grammatical = {t for t in everything if grammar_mask[t // 32] >> (t % 32) & 1}
    if len(output) < rules.min_tokens and grammatical - set(rules.end_token_ids):
        forbidden |= set(rules.end_token_ids)
    return forbidden | (everything - grammatical)


def cut(scores: Tensor, rules: SamplingRules) -> Tensor:
    """min_p, top_k and top_p, by sorting; scores: [vocab_size] float64."""
    probs = scores.softmax(0)
    scores = scores.masked_fill(probs < rules.min_p * probs.max(), -torch.inf)
    if rules.top_k:
        least = scores.sort(descending=True).values[: rules.top_k][-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    ordered = scores.softmax(0).sort(descending=True).values
    is_needed = ordered.cumsum(0) - ordered < rules.top_p
    return scores.masked_fill(scores.softmax(0) < ordered[is_needed][-1], -torch.inf)


def next_token(
    logits: Tensor,  # [vocab_size]
    rules: SamplingRules,
    prompt: Sequence[int],
    output: Sequence[int],
    grammar_mask: np.ndarray | None = None,
) -> int:
    """The token that follows `prompt` and `output`."""
    shaped = shape(logits, rules, prompt, output, grammar_mask)
    if rules.temperature == 0:
        return int(shaped.argmax())
    scores = cut(shaped.double() / rules.temperature, rules)
    return int((scores + _noise(rules.seed, rules.choice, len(output), len(logits))).argmax())


@lru_cache(maxsize=10_000)
def _noise(seed: int, choice: int, position: int, vocab_size: int) -> Tensor:
    num_chunks = -(-vocab_size // CHUNK_TOKENS)
    keys = NoiseKeys(*(torch.full((num_chunks,), value) for value in (seed, choice, position)))
    return gumbel_noise(keys, torch.arange(num_chunks)).flatten()[:vocab_size]


def may_be_next(token: int, logits: Tensor, *context: object) -> bool:
    """Return whether the token is the next one, or equal to it up to rounding."""
    if token == next_token(logits, *context):  # type: ignore[arg-type]
        return True
    generator = torch.Generator().manual_seed(0)
    shaken = (
        logits + ROUNDING * torch.randn(logits.shape, generator=generator) for _ in range(100)
    )
    return any(token == next_token(each, *context) for each in shaken)  # type: ignore[arg-type]
