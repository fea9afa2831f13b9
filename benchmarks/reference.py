"""Outputs of transformers in fp32: the reference of `benchmarks.lossless`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ties import Candidates, Reference
from specdec.sampling.gumbel import CHUNK_TOKENS, NoiseKeys, gumbel_noise

_NUM_CANDIDATES = 8


class TransformersReference:
    """Model run by transformers with batch size 1, KV cache and fp32."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.inference_mode()
    def greedy(self, prompt_id: str, prompt: Sequence[int], max_tokens: int) -> Reference:
        """Generate greedily, to the end-of-sequence token or `max_tokens`."""
        inputs = torch.tensor([prompt])
        result = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_tokens,
            output_scores=True,
            return_dict_in_generate=True,
        )
        token_ids = tuple(result.sequences[0, len(prompt) :].tolist())
        return Reference(prompt_id, token_ids, _best(torch.cat(result.scores)))

    @torch.inference_mode()
    def sampled(
        self,
        prompt_id: str,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        temperature: float,
        seed: int,
    ) -> Reference:
        """Score given output tokens: transformers' logits over the temperature, plus our noise.

        Each token should have the highest score of its position; otherwise the sampler is wrong.
        """
        inputs = torch.tensor([[*prompt, *token_ids[:-1]]])
        logits = self._model(inputs, logits_to_keep=len(token_ids)).logits[0]
        noise = torch.stack(
            [vocabulary_noise(seed, step, logits.shape[1]) for step in range(len(token_ids))]
        )
        scores = torch.log_softmax(logits / temperature, dim=-1) + noise
        return Reference(prompt_id, tuple(token_ids), _best(scores))


def vocabulary_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """Return the Gumbel noise of choice 0 at an output position, [vocab_size] float32."""
    chunks = torch.arange(-(-vocab_size // CHUNK_TOKENS))
    keys = NoiseKeys(
        seeds=torch.full_like(chunks, seed),
        choices=torch.zeros_like(chunks),
        positions=torch.full_like(chunks, position),
    )
    return gumbel_noise(keys, chunks).flatten()[:vocab_size]


def _best(scores: Tensor) -> tuple[Candidates, ...]:
    """Return the best candidates of each position; scores: [num_tokens, vocab_size]."""
    top = scores.topk(min(_NUM_CANDIDATES, scores.shape[1]), dim=-1)
    return tuple(
        Candidates(tuple(ids), tuple(values))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
