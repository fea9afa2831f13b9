"""Driver of transformers' `generate`, with its prompt lookup for workloads of method ngram.

Settings: `dtype`, and `num_lookup_tokens`, the draft tokens of its prompt lookup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.driver_loop import Settings, serve
from benchmarks.workloads import NO_METHOD, Measurement, StreamRecord, Workload


class TransformersContender:
    """Contender that runs several streams as one left-padded batch."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings["num_threads"])
        dtype = getattr(torch, settings["dtype"])
        self._tensor = torch.tensor
        self._num_lookup_tokens: int = settings["num_lookup_tokens"]
        self._model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
        self._pad_token_id: int = self._model.generation_config.eos_token_id
        self._model.generation_config.pad_token_id = self._pad_token_id
        self._model.generation_config.eos_token_id = None  # ignore_eos

    def measure(self, workload: Workload) -> Measurement:
        """Run a workload as one batch."""
        ids, mask = padded_left(workload.prompts, self._pad_token_id)
        options = {}
        if workload.method != NO_METHOD:
            options["prompt_lookup_num_tokens"] = self._num_lookup_tokens
        clock = _ArrivalClock()
        output = self._model.generate(
            self._tensor(ids),
            attention_mask=self._tensor(mask),
            do_sample=False,
            max_new_tokens=workload.max_tokens,
            streamer=clock,
            **options,
        )
        seconds = time.perf_counter() - clock.started_at
        generated = output[:, len(ids[0]) :].tolist()
        arrivals = tuple(clock.arrivals_s)
        return Measurement(
            seconds, tuple(StreamRecord(tuple(each), arrivals) for each in generated)
        )


class _ArrivalClock:
    """Streamer for `generate` that records the arrival times of tokens."""

    def __init__(self) -> None:
        self.started_at = time.perf_counter()
        self.arrivals_s: list[float] = []
        self._has_prompt = False

    def put(self, value: Any) -> None:
        """Receive the prompt first, then the tokens of each step."""
        if self._has_prompt:
            self.arrivals_s.append(time.perf_counter() - self.started_at)
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing; no output is pending."""


def padded_left(
    prompts: Sequence[Sequence[int]], pad_token_id: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return token ids and attention mask, both [num_streams, longest prompt]."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[pad_token_id] * pad + list(p) for pad, p in zip(padding, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
    return ids, mask


if __name__ == "__main__":
    serve(TransformersContender, ("torch", "transformers"))
