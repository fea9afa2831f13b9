"""Models whose steps run on the device, without a GPU: the CPU is the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from specdec.config.engine import DraftLimits, EngineConfig, Kernels
from specdec.kernels.reference.state_pool import StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.heads.networks.base import DraftHead
from specdec.models.hybrid import HybridDecoder
from specdec.models.loading import Decoder, load_model
from specdec.sampling.row_ops import RowOps, row_ops_of
from specdec.types.messages import StepRow
from specdec.worker import DraftModelRunner, LoadedModel, LocalTarget, TargetModelRunner
from specdec.worker.adapters import RankAdapters
from specdec.worker.batch.draft_grammars import DraftGrammars
from specdec.worker.device.step_graphs import GraphBackend
from specdec.worker.device.steps import DeviceSteps
from specdec.worker.target_model_runner import ServedHead
from tests.specdec.grammars import grammar_compiler


class FakeGraphs:
    """Graphs that call the captured function; the buffers are static, as on a GPU.

    runs_captured: whether a function is called when it is captured, too, as CUDA graphs do.
    """

    def __init__(self, *, runs_captured: bool = False) -> None:
        self._runs_captured = runs_captured
        self.num_captured = 0
        self.num_replays = 0
        self.num_bytes = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        if self._runs_captured:
            function()
        self.num_captured += 1

        def replay() -> None:
            self.num_replays += 1
            function()

        return replay


def device_runner(
    directory: Path,
    config: EngineConfig,
    graphs: GraphBackend | None = None,
    group: TensorParallelGroup | None = None,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = "torch",
    head: Path | None = None,
    runs_on_device: bool = True,
) -> TargetModelRunner:
    """Load a target whose decodes and drafts run as on a device, with the head of a directory.

    runs_on_device: False for the operators of the host.
    """
    model, group = ModelConfig.from_directory(directory), group or TensorParallelGroup()
    decoder = load_model(
        directory,
        model,
        group,
        dtype=dtype,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        kernels=kernels,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    method = config.speculation.head.name if config.speculation and head else None
    load = partial(_load_head, model, decoder, method)
    loaded = LoadedModel(
        decoder,
        group,
        model.vocab_size,
        has_padding_block=True,
        adapters=RankAdapters.enabled(decoder, config.adapters),
        states=_states_of(decoder, config),
        row_ops=row_ops_of(kernels, torch.device("cpu")),
    )
    return TargetModelRunner(
        loaded,
        config,
        head=None if head is None else ServedHead(load(head), load),
        on_device=runs_on_device,
        graphs=graphs if runs_on_device else None,
    )


def _states_of(decoder: Decoder, config: EngineConfig) -> StatePool | None:
    if not isinstance(decoder, HybridDecoder):
        return None
    return decoder.enable_states(config.max_num_seqs, config.max_row_guesses, config.num_snapshots)


def _load_head(
    target: ModelConfig, decoder: Decoder, method: str | None, directory: Path
) -> DraftHead:
    return load_head(HeadConfig.from_directory(directory, target, method=method), decoder)


def device_draft_runner(
    directory: Path,
    limits: DraftLimits,
    graphs: GraphBackend | None = None,
    group: TensorParallelGroup | None = None,
) -> DraftModelRunner:
    """Load a draft model whose drafts are made as on a device."""
    model, group = ModelConfig.from_directory(directory), group or TensorParallelGroup()
    decoder = load_model(
        directory,
        model,
        group,
        dtype=torch.float32,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        kernels="torch",
    )
    loaded = LoadedModel(
        decoder,
        group,
        model.vocab_size,
        has_padding_block=True,
        adapters=RankAdapters.enabled(decoder, limits.adapters),
        row_ops=RowOps(),
    )
    grammars = DraftGrammars(grammar_compiler(directory))
    runner = DraftModelRunner(loaded, limits, grammars=grammars)
    runner.use_device_steps(graphs)
    return runner


def device_target(directory: Path, config: EngineConfig, **options: object) -> LocalTarget:
    return LocalTarget(device_runner(directory, config, **options))  # type: ignore[arg-type]


def recorded_device_steps(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[StepRow]]:
    """Return a list that gets the rows of each step that runs on the device."""
    begun, begin = [], DeviceSteps.begin

    def counted(self, columns, states, num_kept=None):
        begun.append(columns.rows)
        return begin(self, columns, states, num_kept)

    monkeypatch.setattr(DeviceSteps, "begin", counted)
    return begun
