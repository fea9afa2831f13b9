"""The models of an `LLM` in its own process, one rank each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from specdec.config.engine import DEFAULT_MODEL_OPTIONS, DraftLimits, EngineConfig
from specdec.config.llm import LLMConfig
from specdec.config.quantization import QuantizationMethod
from specdec.engine.engine_profiler import draft_profile_text
from specdec.engine.executor import SpeculationFactory
from specdec.engine.memory.gpu_memory import gpu_memory_settings
from specdec.engine.memory.memory_plan import MemoryPlan
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.policy.factory import MeasureDraft
from specdec.speculation.proposers import (
    DraftModelProposer,
    DraftVocabulary,
)
from specdec.text.vocab_map import VocabularyMap
from specdec.types.errors import TargetFailedError
from specdec.types.reports.stats import Counts
from specdec.worker import (
    DraftModelRunner,
    HeadFiles,
    LocalDraftWorker,
    LocalTarget,
    RankModel,
    TargetModelRunner,
    load_warm,
)

T = TypeVar("T")


def _on_thread(function: Callable[[], T]) -> T:
    """Run a function on a temporary thread and return its result.

    OpenMP keeps a pool for each thread that computes; with more pool threads than cores they all
    sleep while waiting, and wake up late. So the caller's thread never computes, and only the
    engine's thread keeps a pool.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


class LocalExecutor:
    """See Executor. A failed model is not restarted: there is no process to restart.

    draft_model: the draft model as it was loaded; None without one.
    """

    def __init__(self, config: LLMConfig, directories: ModelDirectories, plan: MemoryPlan) -> None:
        """Load the models and warm them up. Raises what loading raises."""
        self._config = config
        self._directories = directories
        self._plan = plan
        self.draft_model: RankModel | None = None
        self._draft_worker: LocalDraftWorker | None = None
        self._draft: DraftModelProposer | None = None
        self._target: LocalTarget | None = _on_thread(self._load_target)
        _on_thread(self._load_draft)

    @property
    def target(self) -> LocalTarget:
        """See Executor."""
        assert self._target is not None, "the models are closed"
        return self._target

    @property
    def counts(self) -> Counts:
        """See Executor."""
        return Counts() if self._draft is None else self._draft.counts

    @property
    def speculation(self) -> SpeculationFactory:
        """See Executor."""
        text = draft_profile_text(self._directories.draft)
        return SpeculationFactory(self._plan, self._draft, self._measure_draft, text)

    @property
    def _measure_draft(self) -> MeasureDraft | None:
        worker = self._draft_worker
        return None if worker is None else lambda measure: measure(worker)

    def measure(self, function: Callable[[LocalTarget], T]) -> T:
        """See Executor."""
        return _on_thread(lambda: function(self.target))

    def mark_target_lost(self) -> None:
        """See Executor."""

    def forgive_losses(self) -> None:
        """See Executor."""

    def restart_target(self) -> LocalTarget:
        """See Executor."""
        raise TargetFailedError("the target runs in this process and cannot be restarted")

    def close(self) -> None:
        """See Executor; memory is freed with the last reference, graphs of a GPU now."""
        if self._target is not None:
            self._target.close()
        if self._draft_worker is not None:
            self._draft_worker.close()
        self._target = self._draft_worker = self._draft = None

    def _load_target(self) -> LocalTarget:
        quantization = self._config.quantization_method
        directory, method = self._directories.head, self._config.head
        head = None
        if directory is not None and method is not None:
            token_map = method.speculative_token_map
            keys = method.quantization, method.window, token_map, method.name
            head = HeadFiles(directory, *keys)
        target, limits = self._directories.target, self._plan.engine
        model = self._rank_model(target, limits, quantization, head=head)
        runner = load_warm(model, TensorParallelGroup())
        assert isinstance(runner, TargetModelRunner)
        return LocalTarget(runner)

    def _load_draft(self) -> None:
        limits, directory = self._plan.draft, self._directories.draft
        drafting = self._config.draft_model
        if limits is None or directory is None or drafting is None:
            return
        options = self._config.model_options
        vocabulary = DraftVocabulary.between(directory, self._directories.target, options)
        shared = vocabulary.shared
        self.draft_model = self._rank_model(directory, limits, drafting.quantization, shared)
        runner = load_warm(self.draft_model, TensorParallelGroup())
        assert isinstance(runner, DraftModelRunner)
        self._draft_worker = LocalDraftWorker(runner)
        self._draft = DraftModelProposer(self._draft_worker, limits, vocabulary.new_adapter())

    def _rank_model(
        self,
        directory: Path,
        limits: EngineConfig | DraftLimits,
        quantization: QuantizationMethod | None,
        vocabulary: VocabularyMap | None = None,
        head: HeadFiles | None = None,
    ) -> RankModel:
        config = self._config
        return RankModel(
            directory,
            config.resolved_dtype,
            limits,
            quantization,
            torch.device(config.device),
            config.kernels,
            vocabulary,
            head,
            config.model_options if isinstance(limits, EngineConfig) else DEFAULT_MODEL_OPTIONS,
            gpu_memory_settings(config),
        )
