"""The engine in this process, on a clocked device, for the requests of a load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from benchmarks.contenders import run_requests
from benchmarks.service_cpu.device import ClockedRunner
from benchmarks.service_cpu.load import Load
from specdec.config.hardware import available_memory_bytes
from specdec.config.llm import LLMConfig
from specdec.engine.engine import Engine
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.worker import LocalTarget, TargetModelRunner


class InProcess:
    """An engine with the settings of a service."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        names = settings.keys() & LLMConfig.__dataclass_fields__.keys()
        config = LLMConfig(model=str(directory), **{name: settings[name] for name in names})
        models = ModelDirectories(directory, None).configs()
        self._config = memory_plan(config, models, available_memory_bytes()).engine
        self._model, self._tokenizer = models.target, Tokenizer(directory)
        self._directory = directory

    def tokens_per_s(self, load: Load, seed: int) -> float:
        """Run the requests of a load, as many at once as it has streams."""
        runner = ClockedRunner(self._directory)
        target = LocalTarget(cast("TargetModelRunner", runner))
        engine = Engine(self._config, self._model, target, self._tokenizer)
        params = SamplingParams(
            temperature=0, max_tokens=load.max_tokens, min_tokens=load.max_tokens, ignore_eos=True
        )
        requests = [
            EngineRequest(tuple(prompt), params, request_id=str(index), seed=0)
            for index, prompt in enumerate(load.prompts(seed))
        ]
        try:
            return load.num_tokens / run_requests(engine, requests, load.streams).seconds
        finally:
            runner.close()
