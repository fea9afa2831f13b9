"""The cases of benchmarks.heads: drafts of heads, and verification of trees."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.random_heads import HEADS
from benchmarks.step_bench import Precision
from benchmarks.tree_verification import TreeBench
from specdec.config.quantization import QuantizationMethod
from specdec.kernels.forward_batch import Chunk, ModelInput
from specdec.kernels.sample import SampleParams, row_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config import ModelConfig
from specdec.models.heads.base import DraftHead, WholeDraftHead
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
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


class HeadBench:
    """A target and heads beside it, in one precision."""

    def __init__(self, directory: Path, heads: Path, precision: Precision) -> None:
        """Load the model in `directory`, and the heads in the folders of `heads`."""
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
        self._heads = {path.name: self._load(path, quantization) for path in heads.iterdir()}
        of_int8 = () if quantization else ("dspark", "medusa")
        self._in_int8 = {name: self._load(heads / name, "int8") for name in of_int8}
        half = self._write_half(self._heads["medusa"], heads / "medusa" / "half.json")
        self._medusa_half = self._load(heads / "medusa", quantization, half)
        self._trees = TreeBench(directory, precision)

    def cases(self) -> dict[str, HeadCase]:
        """Return all cases by name."""
        return {TARGET: HeadCase(self._target_step), **self._head_cases(), **self._tree_cases()}

    def _head_cases(self) -> dict[str, HeadCase]:
        eagle3, dspark = self._heads["eagle3"], self._heads["dspark"]
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
            "medusa, 5 heads, one output head": HeadCase(self._steps(self._heads["medusa-shared"])),
            "medusa, 5 heads, half of the tokens": HeadCase(self._steps(self._medusa_half)),
        }
        if self._in_int8:
            own, medusa = self._in_int8["dspark"], self._in_int8["medusa"]
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
        self,
        directory: Path,
        quantization: QuantizationMethod | None,
        token_map: str | None = None,
    ) -> DraftHead:
        config = HeadConfig.from_directory(directory, self._config, token_map=token_map)
        return load_head(config, self._target, quantization)

    def _write_half(self, head: DraftHead, path: Path) -> str:
        """Write a token map with every second token of a head."""
        assert head.target_ids is not None
        path.write_text(json.dumps(head.target_ids[::2].tolist()))
        return str(path)

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
    """Write the checkpoints of all heads, each in a folder."""
    torch.manual_seed(0)
    for name, kind in HEADS.items():
        kind.write(directory / name, target)
