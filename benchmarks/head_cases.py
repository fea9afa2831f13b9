"""The cases of benchmarks.heads: drafts of heads, and verification of trees."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from benchmarks.random_heads import HEADS
from benchmarks.step_bench import Precision
from benchmarks.tree_verification import TreeBench
from specdec.config.quantization import QuantizationMethod
from specdec.kernels.reference.forward_batch import Chunk, ModelInput
from specdec.kernels.reference.sample_rows import SampleParams
from specdec.kernels.sample import row_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.heads.networks.base import DraftHead, WholeDraftHead
from specdec.models.loading import load_model
from specdec.sampling.sampler import SamplingBatch

_BLOCK_SIZE = 16
_NUM_BLOCKS = 16
_CONTEXT = 128
_NUM_DRAFTS = 4

TARGET = "target step"

Work = Callable[[], object]


@dataclass(frozen=True)
class HeadCase:
    """Work to time.

    num_repeats: of what is timed, in one run. reference: the case whose time is the unit.
    """

    run: Work
    num_repeats: int = 1
    reference: str = TARGET


class _HeadFiles(NamedTuple):
    """How a head is loaded. directory, token_map: of its files; quantization: not the target's."""

    name: str
    directory: str
    token_map: str | None = None
    quantization: QuantizationMethod | None = None


_HALF_MAP = "half.json"

_FILES = (
    *(_HeadFiles(name, name) for name in HEADS),
    _HeadFiles("half of medusa", "medusa", _HALF_MAP),
)
_IN_INT8 = tuple(
    _HeadFiles(f"{name} in int8", name, quantization="int8") for name in ("dspark", "medusa")
)
"""Beside a target in fp32."""


class HeadBench:
    """A target and heads beside it, in one precision."""

    def __init__(
        self, directory: Path, heads: Path, precision: Precision, order: random.Random
    ) -> None:
        """Load the model in `directory`, and the heads in the folders of `heads` in any `order`."""
        self._config = ModelConfig.from_directory(directory)
        quantization = precision.quantization
        self._target = load_model(
            directory,
            self._config,
            TensorParallelGroup(),
            dtype=torch.float32,
            max_model_len=_NUM_BLOCKS * _BLOCK_SIZE,
            block_size=_BLOCK_SIZE,
            quantization=quantization,
            kernels="native",
        )
        self._cache = self._target.new_kv_cache(_NUM_BLOCKS * _BLOCK_SIZE).normal_()
        files = [*_FILES, *(() if quantization else _IN_INT8)]
        self._heads = {
            each.name: self._load(heads, each, each.quantization or quantization)
            for each in order.sample(files, len(files))
        }
        self._trees = TreeBench(directory, precision)

    def cases(self) -> dict[str, HeadCase]:
        """Return all cases by name."""
        return {TARGET: HeadCase(self._target_step), **self._head_cases(), **self._tree_cases()}

    def _head_cases(self) -> dict[str, HeadCase]:
        eagle3, dspark = self._heads["eagle3"], self._heads["dspark"]
        shared, half = self._heads["medusa-shared"], self._heads["half of medusa"]
        cases = {
            "eagle3 draft token": HeadCase(self._whole_draft(eagle3, 0.0), _NUM_DRAFTS),
            "eagle3 draft token, temperature 0.8": HeadCase(
                self._whole_draft(eagle3, 0.8), _NUM_DRAFTS
            ),
            "eagle3 draft token, a call for each": HeadCase(self._steps(eagle3), _NUM_DRAFTS),
            "dspark, block of 7": HeadCase(self._whole_draft(dspark, 0.0)),
            "dspark, block of 7, temperature 0.8": HeadCase(self._whole_draft(dspark, 0.8)),
            "dspark, block of 7, a call for each": HeadCase(self._steps(dspark)),
            "medusa, 5 heads": HeadCase(self._steps(self._heads["medusa"])),
            "medusa, 5 heads, one output head": HeadCase(self._steps(shared)),
            "medusa, 5 heads, half of the tokens": HeadCase(self._steps(half)),
        }
        if "dspark in int8" in self._heads:
            own, medusa = self._heads["dspark in int8"], self._heads["medusa in int8"]
            cases["dspark, block of 7 in int8"] = HeadCase(self._whole_draft(own, 0.0))
            cases["medusa, 5 heads in int8"] = HeadCase(self._steps(medusa))
        return cases

    def _tree_cases(self) -> dict[str, HeadCase]:
        cases, count = dict[str, HeadCase](), self._trees.num_nodes
        for num_tokens, (chain, tree) in self._trees.pairs().items():
            reference = f"chain of {count} behind {num_tokens}"
            cases[reference] = HeadCase(chain)
            cases[f"tree of {count} behind {num_tokens}"] = HeadCase(tree, reference=reference)
        return cases

    def _load(
        self, heads: Path, files: _HeadFiles, quantization: QuantizationMethod | None
    ) -> DraftHead:
        directory = heads / files.directory
        token_map = str(directory / files.token_map) if files.token_map else None
        config = HeadConfig.from_directory(directory, self._config, token_map=token_map)
        return load_head(config, self._target, quantization)

    def _target_step(self) -> None:
        hidden = self._target(_one_row(), self._cache)
        self._target.compute_logits_and_argmax(hidden)

    def _whole_draft(self, head: DraftHead, temperature: float) -> Work:
        assert isinstance(head, WholeDraftHead)
        cache = head.new_kv_cache(_NUM_BLOCKS * _BLOCK_SIZE)
        assert cache is not None
        cache.normal_()
        features, params = torch.randn(1, head.feature_size), _params(temperature)
        counts = [head.max_draft_tokens or _NUM_DRAFTS]
        return lambda: head.draft(_one_row(), features, cache, counts, params)

    def _steps(self, head: DraftHead) -> Work:
        cache = head.new_kv_cache(_NUM_BLOCKS * _BLOCK_SIZE)
        if cache is not None:
            cache.normal_()
        count = head.max_draft_tokens or _NUM_DRAFTS
        features = torch.randn(1, head.feature_size)

        def draft() -> None:
            state = head.begin(_one_row(), features, cache, count)
            for index in range(count):
                argmax = row_argmax(head.logits(state, index))
                if index + 1 < count:
                    state = head.advance(state, argmax.token_ids.tolist(), index)

        return draft


def _one_row() -> ModelInput:
    return ModelInput([Chunk([100], _CONTEXT, range(_NUM_BLOCKS))], _BLOCK_SIZE)


def _params(temperature: float) -> SampleParams:
    return SamplingBatch.from_lists(
        temperatures=[temperature],
        top_k=[0],
        top_p=[1.0],
        min_p=[0.0],
        seeds=[1],
        choices=[0],
        positions=[_CONTEXT],
    ).params


def write_heads(directory: Path, target: ModelConfig) -> None:
    """Write the checkpoints of all heads, each in a folder, and a map with half of the tokens."""
    torch.manual_seed(0)
    for name, kind in HEADS.items():
        kind.write(directory / name, target)
    with safe_open(directory / "medusa" / "model.safetensors", "pt") as tensors:
        half = tensors.get_tensor("token_map")[::2].tolist()
    (directory / "medusa" / _HALF_MAP).write_text(json.dumps(half))
