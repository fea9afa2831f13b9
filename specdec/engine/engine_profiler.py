"""Profiler of the engine's own part of a step: scheduling, rows, commit; without any model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.config.engine import EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.cost_profiler import ProfiledStep, StepShapes
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.sample_text import SAMPLE_TEXT
from specdec.speculation.proposers import DraftRequest, Proposal, SynchronousProposer
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import StepInput, StepRow, VerifiedRow, VerifyOutput
from specdec.types.sampling.sampling_params import SamplingParams

_NUM_STEPS = 5
_NUM_OTHER_STEPS = 3
"""One computes the prompts, one is in flight at the end, one is spare."""

_TOKEN = 0


class InstantTarget:
    """Target that accepts the first half of each draft without running anything."""

    def __init__(self) -> None:
        self._step: StepInput | None = None

    def begin(self, step: StepInput) -> None:
        """Keep the step."""
        self._step = step

    def collect(self) -> VerifyOutput:
        """Return tokens for every row that samples."""
        assert self._step is not None, "collect before begin"
        rows = tuple(_verified(row) for row in self._step.rows if row.samples)
        return VerifyOutput(self._step.step_id, rows)


def _verified(row: StepRow) -> VerifiedRow:
    drafts = row.token_ids[len(row.token_ids) - row.num_draft_tokens :]
    return VerifiedRow(row.seq_id, (*drafts[: len(drafts) // 2], _TOKEN))


class InstantProposer(SynchronousProposer):
    """Proposer that always drafts as many tokens as it may."""

    def release(self, seq_id: int) -> None:
        """Do nothing: there is no state."""

    def _propose(self, request: DraftRequest) -> Proposal:
        seq = request.seq
        draft = (_TOKEN,) * request.max_tokens
        return Proposal(seq.seq_id, seq.num_tokens, seq.token_ids[-1], draft)


@dataclass(frozen=True)
class EngineProfiler:
    """Measures steps of engines whose target and proposer take no time.

    What remains is serial around a forward pass, unless the step is begun ahead.
    """

    config: EngineConfig
    model: ModelConfig
    tokenizer: Tokenizer
    clock: Callable[[], float] = time.perf_counter

    def measure(self, most: int, budget_s: float) -> CostTable:
        """Return the seconds of steps with up to `most` draft tokens, the shortest of a few."""
        started_at_s, seconds = self.clock(), dict[ProfiledStep, float]()
        shapes = StepShapes.of(self.config, most, smallest=0)
        for step in shapes.steps():
            if seconds and self.clock() - started_at_s > budget_s:
                break
            seconds[step] = self._seconds(self._engine(step), step.num_sequences)
        return shapes.table(seconds)

    @property
    def text(self) -> tuple[int, ...]:
        """Tokens of a text, if the target's steps may depend on their text; see CostProfiler."""
        return _profile_text(self.model, lambda: self.tokenizer)

    def _seconds(self, engine: Engine, num_sequences: int) -> float:
        while engine.stats().num_decoding < num_sequences:
            engine.step()
        shortest_s = math.inf
        for _ in range(_NUM_STEPS):
            begun_at_s = self.clock()
            engine.step()
            shortest_s = min(shortest_s, self.clock() - begun_at_s)
        return shortest_s

    def _engine(self, step: ProfiledStep) -> Engine:
        """Return an engine with the step's requests, which do not end while they are measured."""
        count, block_size = step.num_draft_tokens, self.config.block_size
        max_tokens = (1 + count) * (_NUM_STEPS + _NUM_OTHER_STEPS)
        length = 1 + max_tokens  # prompts of one token, which all fit into one step
        config = replace(
            self.config,
            async_scheduling=False,
            max_model_len=length,
            num_blocks=step.num_sequences * math.ceil(length / block_size),
            speculation=_speculation(count),
        )
        proposer = InstantProposer() if count else None
        engine = Engine(config, self.model, InstantTarget(), self.tokenizer, proposer)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for index in range(step.num_sequences):
            engine.add(
                EngineRequest(prompt=(_TOKEN,), params=params, request_id=str(index), seed=0)
            )
        return engine


def draft_profile_text(directory: Path | None) -> tuple[int, ...]:
    """Return the text of `EngineProfiler.text` for a draft model, in its vocabulary.

    directory: of the draft model; None without one.
    """
    if directory is None:
        return ()
    return _profile_text(ModelConfig.from_directory(directory), lambda: Tokenizer(directory))


def _profile_text(model: ModelConfig, tokenizer: Callable[[], Tokenizer]) -> tuple[int, ...]:
    if model.experts is None and model.transformers is None:
        return ()
    return tuple(tokenizer().encode(SAMPLE_TEXT, add_special_tokens=False))


def _speculation(num_draft_tokens: int) -> SpeculativeConfig | None:
    if not num_draft_tokens:
        return None
    return SpeculativeConfig.of("ngram", num_speculative_tokens=num_draft_tokens)
