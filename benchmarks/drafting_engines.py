"""One stream with a draft model, by mode of drafting: the engine, and what its runs yield."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.quantization import QuantizationMethod
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.weights.checkpoint import CPU
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import DraftModelProposer
from specdec.speculation.proposers.outcome_planner import OutcomePlanner
from specdec.text.tokenizer import Tokenizer
from specdec.types.ranks import DraftWorker, Target
from specdec.types.reports.stats import Counts
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.worker import LocalTarget, RankModel, load_target

SYNCHRONOUS = "off"
MODES = (SYNCHRONOUS, "continuing", "outcomes")
NO_DRAFTER, SWITCHED_OFF = "no drafter", "switched off"
"""Runs without speculation: without a draft model, and by an operator's order, with `outcomes`."""

_MAX_MODEL_LEN, _NUM_BLOCKS, _BLOCK_SIZE = 512, 32, 16
LIMITS = DraftLimits(
    num_blocks=_NUM_BLOCKS,
    block_size=_BLOCK_SIZE,
    max_model_len=_MAX_MODEL_LEN,
    max_catch_up_tokens=256,
    enable_prefix_caching=False,
)


@dataclass
class Run:
    """One value of async_drafting with one number of draft tokens, over all prompts.

    mode: also one of the runs without speculation. seconds: without prefill. draft_cpu_s: of the
        draft model's process.
    """

    mode: str
    num_draft_tokens: int
    tokens_per_s: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    draft_cpu_s: float = 0.0

    @property
    def median(self) -> float:
        """Median over the prompts."""
        return median(self.tokens_per_s)


class Models(NamedTuple):
    """The models of a run."""

    target: Target
    worker: DraftWorker


class Engines:
    """Engines for one stream, with the observations of each mode kept from run to run."""

    def __init__(self, directory: Path, temperature: float, clock: Callable[[], float]) -> None:
        """directory: of the target. clock: in seconds."""
        self.directory = directory
        self.temperature = temperature
        self._clock = clock
        self._model, self._tokenizer = ModelConfig.from_directory(directory), Tokenizer(directory)
        self._planners: dict[str, OutcomePlanner] = {}

    def run(
        self, run: Run, models: Models, prompt: tuple[int, ...], max_tokens: int
    ) -> tuple[int, ...]:
        """Generate after a prompt, record the speed without prefill, and return the tokens."""
        proposer = DraftModelProposer(models.worker, LIMITS, clock=self._clock)
        planner = self._planners.setdefault(run.mode, OutcomePlanner(self._clock))
        proposer.keep_observations(planner)
        engine = self._engine(models.target, proposer, run)
        params = SamplingParams(
            temperature=self.temperature, ignore_eos=True, max_tokens=max_tokens
        )
        engine.add(EngineRequest(prompt, params, request_id="r", seed=0))
        token_ids: list[int] = []
        while not token_ids:
            token_ids += [each for output in engine.step() for each in output.token_ids]
        began_at_s, first = self._clock(), len(token_ids)
        while engine.has_work:
            token_ids += [each for output in engine.step() for each in output.token_ids]
        seconds = self._clock() - began_at_s
        run.seconds += seconds
        run.tokens_per_s.append((len(token_ids) - first) / seconds)
        run.counts = run.counts.plus(engine.stats().counts.plus(proposer.counts))
        models.worker.collect_ahead(wait=True)
        return tuple(token_ids)

    def _engine(self, target: Target, proposer: DraftModelProposer, run: Run) -> Engine:
        speculation = policy = None
        if run.mode != NO_DRAFTER:
            mode = "outcomes" if run.mode == SWITCHED_OFF else run.mode
            speculation = SpeculativeConfig.of(
                "draft_model", run.num_draft_tokens, async_drafting=mode, policy="threshold"
            )
        if run.mode == SWITCHED_OFF:
            assert speculation is not None
            policy = SpeculationPolicy(replace(speculation.control, mode="off"), self._clock)
        config = EngineConfig(
            max_model_len=_MAX_MODEL_LEN,
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            max_num_seqs=1,
            enable_prefix_caching=False,
            speculation=speculation,
        )
        return Engine(
            config,
            self._model,
            target,
            self._tokenizer,
            None if speculation is None else proposer,
            policy,
            clock=self._clock,
        )


def local_target(
    directory: Path,
    quantization: QuantizationMethod | None = None,
    device: torch.device = CPU,
    speculation: SpeculativeConfig | None = None,
) -> LocalTarget:
    """Load the target in this process, in float32. speculation: for the graphs of a GPU."""
    config = EngineConfig(
        max_model_len=_MAX_MODEL_LEN,
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        max_num_seqs=1,
        speculation=speculation,
    )
    group = TensorParallelGroup()
    return LocalTarget(
        load_target(
            RankModel(directory, "float32", config, quantization=quantization, device=device), group
        )
    )
