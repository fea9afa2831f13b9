"""Random histories of an engine whose target has a recurrence in place of a model.

Its state depends on every token before it, and is kept by the ranks' own `BatchState` and
`StatePool`: a state that was not rolled back, or of another text, changes the tokens after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property

import torch

from specdec.config.engine import EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.reference.state_pool import StatePlan, StatePool, StateSpan
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationControl
from specdec.types.messages import StepInput, StepRow, VerifyOutput
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.worker.batch.batch_state import BatchState
from tests.chaos.history import Tokens
from tests.chaos.simulation import MAX_MODEL_LEN, VOCAB_SIZE, LossyTarget, Simulation
from tests.specdec.engines import HashTarget, ScriptedProposer, engine_config

WINDOW = 2
MODULUS = 65_521
MAX_GUESSES = 5


def next_state(state: float, inputs: Sequence[float]) -> float:
    """Return the state after another token; inputs: those of the window, then its own."""
    mixed = inputs[2] + 3 * inputs[1] + 5 * inputs[0]
    return (31 * state + mixed + 1) % MODULUS


def state_after(tokens: Sequence[int]) -> float:
    """Return the state after a text, from its first token on."""
    inputs, state = [0] * WINDOW + list(tokens), 0.0
    for place in range(len(tokens)):
        state = next_state(state, inputs[place : place + WINDOW + 1])
    return state


@cache
def _speculation(num_draft_tokens: int) -> SpeculativeConfig | None:
    return engine_config(num_draft_tokens).speculation


class RecurrentTarget(LossyTarget):
    """A target whose tokens depend on states, and on KV.

    salt_of: of a sequence, by its id. saved: positions of snapshots, in their order. shared:
    snapshots that were used with another salt.
    """

    def __init__(
        self,
        salt_of: Callable[[int], str] = lambda seq_id: "",
        has_bad_logits: Callable[[], bool] = lambda: False,
        *,
        block_size: int = 1,
        num_seqs: int = 0,
        num_snapshots: int = 0,
    ) -> None:
        super().__init__(None, has_bad_logits)
        self.block_size = block_size
        self.pool = StatePool(
            1,
            WINDOW,
            1,
            (1,),
            num_slots=num_seqs,
            max_guesses=MAX_GUESSES,
            num_snapshots=num_snapshots,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self._memory = self.pool.memory[0, :, 0].numpy()  # shares the memory
        self.batch = BatchState(block_size, self.pool.inputs.device, range(VOCAB_SIZE), self.pool)
        self.saved: list[int] = []
        self.shared: list[int] = []
        self._salt_of = salt_of
        self._salts: dict[int, str] = {}  # of sequences
        self._saved_salts: dict[int, str] = {}  # of snapshots
        self._step: StepInput | None = None
        self._after: dict[int, dict[int, float]] = {}  # states by sequence and length
        self._present: dict[int, float] = {}  # of the row that is verified

    @property
    def num_sequences(self) -> int:
        """Sequences that have a slot."""
        return self.pool.num_slots - len(self.batch._free_slots)

    def begin(self, step: StepInput) -> None:
        self._salts |= {each.seq_id: self._salt_of(each.seq_id) for each in step.admitted}
        super().begin(step)

    @torch.inference_mode()
    def collect(self) -> VerifyOutput:
        output = super().collect()
        assert self._step is not None
        self.batch.save_states(self._step)
        for seq_id, snapshot in self._step.saves:
            self._saved_salts[snapshot.slot] = self._salts[seq_id]
            self.saved.append(snapshot.position)
        return output

    def next_token(self, context: Sequence[int]) -> int:
        state = self._present.get(len(context))
        of_text = (state_after(context) if state is None else state, context[len(context) // 2])
        return super().next_token([hash((*of_text, *context[-3:]))])

    def _update(self, step: StepInput) -> None:
        super()._update(step)
        self._step = step
        for each in step.admitted:
            if each.snapshot is not None:
                own = self._salts[each.seq_id]
                if self._saved_salts.get(each.snapshot.slot) != own:
                    self.shared.append(each.snapshot.slot)
        self.batch.update(step)

    def _run(self, rows: Sequence[StepRow]) -> None:
        plan = self.pool.plan(self.batch.forward_batch(rows))
        tokens = [float(token) for row in rows for token in row.token_ids]
        inputs = self.pool.extend(0, torch.tensor(tokens)[:, None], plan)[:, 0].tolist()
        for row, span in zip(rows, plan.spans, strict=True):
            self._after[row.seq_id] = self._run_row(row, span, inputs, plan)

    def _run_row(
        self, row: StepRow, span: StateSpan, inputs: Sequence[float], plan: StatePlan
    ) -> dict[int, float]:
        state, after = float(self._memory[span.slot]), {}
        length = row.num_computed_tokens - span.num_replayed
        for place in range(span.num_run):
            start = span.first + place
            state = next_state(state, inputs[start : start + plan.window + 1])
            after[length + place + 1] = state
            if place + 1 == span.num_committed:
                self._memory[span.slot] = state
        return after

    def _verify(self, context: list[int], row: StepRow) -> tuple[int, ...]:
        self._present = self._after[row.seq_id]
        tokens = super()._verify(context, row)
        self._present = {}
        self.batch.append_output(row, tokens)
        if not tokens:  # bad logits: the state is no number
            self._memory[self.batch.states([row])[0].state_slot] = math.nan
        return tokens


class RecurrentSimulation(Simulation):
    """A history with prefix cache and drafts, with one of them, or without both."""

    target: RecurrentTarget
    num_events = 20

    @cached_property
    def _config(self) -> EngineConfig:
        choose, block_size = self.random.choice, self.random.choice((1, 1, 2, 4))
        longest = MAX_MODEL_LEN // block_size
        return engine_config(
            speculation=_speculation(choose((0, 0, 0, 1, 3, MAX_GUESSES))),
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            num_blocks=longest + choose((0, 4, longest, 2 * longest)),
            max_num_seqs=choose((1, 2, 4, 8)),
            max_num_batched_tokens=choose((8, 16, 64)),
            max_prefill_tokens=choose((None, 4)),
            enable_prefix_caching=choose((True, False)),
            stream_interval=choose((1, 1, 3)),
            async_scheduling=choose((True, False)),
            keeps_guesses=True,
            num_snapshots=choose((1, 2, 4, 20)),
            snapshot_interval=choose((4, 6, 32)),
        )

    @property
    def has_cache(self) -> bool:
        return self._config.enable_prefix_caching

    @property
    def has_drafts(self) -> bool:
        return self._config.speculation is not None

    def _make_reference(self) -> HashTarget:
        return RecurrentTarget()

    def _make_target(self) -> RecurrentTarget:
        return RecurrentTarget(
            self._salt_of,
            lambda: self.random.random() < 0.01,
            block_size=self._config.block_size,
            num_seqs=self._config.max_num_seqs,
            num_snapshots=self._config.num_snapshots,
        )

    def _make_engine(self, model: ModelConfig, tokenizer: Tokenizer) -> Engine:
        config, proposer, policy = self._config, None, None
        self._max_num_seqs = self.target.max_num_seqs = config.max_num_seqs
        if self.has_drafts:
            proposer = self.random.choice((ScriptedProposer(self._draft), None))
            policy = SpeculationPolicy(SpeculationControl("on", 32, 3), lambda: self._now_s)
        return Engine(
            config, model, self.target, tokenizer, proposer, policy, clock=lambda: self._now_s
        )

    def _salt_of(self, seq_id: int) -> str:
        sequences = self.engine._requests.sequences
        return next((each.request.cache_salt for each in sequences if each.seq_id == seq_id), "")

    def _prompt(self) -> Tokens:
        """Return the beginning of one of two texts, with another end where it is short."""
        choose = self.random.randrange
        first, length = choose(2), choose(1, 28)
        place = choose(2 * length)
        others = (choose(10, 14) for _ in range(place, length))
        return (*(10 + (first + place // 3) % 4 for place in range(min(place, length))), *others)

    def _toggle(self) -> None:
        if self.has_drafts:
            super()._toggle()

    def _end(self) -> list[str]:
        """Find states that sequences have left, and snapshots of another salt."""
        faults = super()._end()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self.engine.add(EngineRequest((10,), params, request_id="last", seed=0))
        while self.engine.has_work:  # what was released is sent with its step
            self.engine.step()
        self.engine.check_integrity()
        if self.target.num_sequences > 1:
            faults.append(f"{self.target.num_sequences - 1} states of sequences leaked")
        snapshots = self.engine._blocks.snapshots
        if snapshots is not None and snapshots._pending:
            faults.append(f"{len(snapshots._pending)} snapshots leaked")
        return faults + [f"snapshot {slot} shared across salts" for slot in self.target.shared]
