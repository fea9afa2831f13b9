"""Recorded greedy answers to the benchmarks' prompts, so that drafting can be replayed.

Greedy text is the same with any drafting method, and a draft is accepted as far as it equals that
text. So the acceptance of any method and length can be counted on a recording, without the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.precisions import PRECISIONS, Precision
from benchmarks.prompts import BenchmarkPrompt
from specdec import LLM, SamplingParams
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.dtypes import DTYPES
from specdec.models.loading import load_model

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Recording:
    """Prompt with its greedy continuation.

    draft_agrees: for each output token, whether it is also the draft model's most likely token
        after all tokens before it. While a draft is correct it consists of these tokens, so the
        model's own draft is correct as long as this is true.
    """

    prompt_id: str
    suite: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    draft_agrees: tuple[bool, ...]


def record(directory: Path, prompts: Sequence[BenchmarkPrompt], max_tokens: int) -> list[Recording]:
    """Generate the continuations in fp32, and compare them with an int8 copy of the model."""
    outputs = continuations(directory, prompts, max_tokens)
    scorer = TextScorer(directory, PRECISIONS["int8"])
    return [
        Recording(
            prompt.prompt_id,
            prompt.suite,
            prompt.token_ids,
            output,
            scorer.agrees(prompt.token_ids, output),
        )
        for prompt, output in zip(prompts, tqdm(outputs, "draft model", leave=False), strict=True)
    ]


def save(recordings: Sequence[Recording], path: Path) -> None:
    """Write recordings as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(each) for each in recordings]), encoding="utf-8")


def load(path: Path) -> list[Recording]:
    """Read the recordings written by `save`."""
    return [
        Recording(**{key: _as_tuple(value) for key, value in each.items()})
        for each in json.loads(path.read_text(encoding="utf-8"))
    ]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def continuations(
    directory: Path, prompts: Sequence[BenchmarkPrompt], max_tokens: int
) -> list[tuple[int, ...]]:
    """Return fp32's greedy outputs, up to the end-of-sequence token or `max_tokens`."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    token_ids = [list(each.token_ids) for each in prompts]
    with LLM(str(directory), dtype="float32", speculative_config=None) as llm:
        return [tuple(each.outputs[0].token_ids) for each in llm.generate(token_ids, params)]


class TextScorer:
    """Model in one precision that scores a whole text in one pass."""

    def __init__(self, directory: Path, precision: Precision) -> None:
        model = ModelConfig.from_directory(directory)
        self._model = load_model(
            directory,
            model,
            TensorParallelGroup(),
            dtype=DTYPES[precision.dtype],
            max_model_len=model.max_position_embeddings,
            block_size=_BLOCK_SIZE,
            quantization=precision.quantization,
        )
        self._cache = self._model.new_kv_cache(model.max_position_embeddings)

    @torch.inference_mode()
    def agrees(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[bool, ...]:
        """Return, for each token of `output`, whether it is the most likely one."""
        token_ids = [*prompt, *output[:-1]]
        chunk = Chunk(token_ids, 0, range(-(-len(token_ids) // _BLOCK_SIZE)))
        hidden = self._model(ForwardBatch([chunk], _BLOCK_SIZE), self._cache)
        most_likely = self._model.compute_logits(hidden[-len(output) :]).argmax(-1)
        return tuple((most_likely == torch.tensor(output)).tolist())
