"""Speeds of the engine and of `generate` of transformers with the same model, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from specdec import LLM, SamplingParams

_PROMPT = tuple(37 * index % 8000 + 3 for index in range(64))
_NUM_STREAMS = 16


@dataclass(frozen=True)
class Round:
    """Tokens per second of one round."""

    generate: float
    one_stream: float
    many_streams: float


class SpeedBench:
    """The engine and transformers with the same model."""

    def __init__(self, directory: Path, num_tokens: int, clock: Callable[[], float]) -> None:
        self._num_tokens, self._clock = num_tokens, clock
        self._reference = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        ).eval()
        self._llm = LLM(str(directory), speculative_config=None, max_model_len=512, dtype="float32")

    def measure(self) -> Round:
        """Return the speeds of one round."""
        return Round(
            self._speed(1, self._generate),
            self._speed(1, lambda: self._serve(1)),
            self._speed(_NUM_STREAMS, lambda: self._serve(_NUM_STREAMS)),
        )

    def close(self) -> None:
        """Free the engine."""
        self._llm.shutdown()

    def _speed(self, num_streams: int, run: Callable[[], None]) -> float:
        start = self._clock()
        run()
        return num_streams * self._num_tokens / (self._clock() - start)

    @torch.inference_mode()
    def _generate(self) -> None:
        self._reference.generate(
            torch.tensor([_PROMPT]),
            max_new_tokens=self._num_tokens,
            min_new_tokens=self._num_tokens,
            do_sample=False,
            pad_token_id=0,
        )

    def _serve(self, num_streams: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self._num_tokens, ignore_eos=True)
        shifted = [[(each + index) % 8000 + 3 for each in _PROMPT] for index in range(num_streams)]
        self._llm.generate(shifted, params, use_tqdm=False)
