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
from specdec.kernels.reference.state_pool import StatePlan, StatePool
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposal
from specdec.speculation.proposers.base import DraftRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationControl
from specdec.types.drafts import draft_tree
from specdec.types.messages import StepInput, StepRow, VerifyOutput
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.worker.batch.batch_state import BatchState
from tests.chaos.history import Tokens
from tests.chaos.simulation import MAX_MODEL_LEN, VOCAB_SIZE, LossyTarget, Simulation
from tests.specdec.engines import HashTarget, ScriptedProposer, engine_config

WINDOW = 2
MODULUS = 65_521
MAX_DEPTH, MAX_GUESSES = 5, 8
"""Limits of a draft; a tree has more tokens than it is deep."""


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
def _speculation(num_draft_tokens: int, num_nodes: int) -> SpeculativeConfig | None:
    if not num_draft_tokens:
        return None
    return SpeculativeConfig.of(
        num_speculative_tokens=num_draft_tokens,
        prompt_lookup_min=1,
        num_draft_tree_tokens=num_nodes if num_nodes > num_draft_tokens else 0,
    )


class BranchingProposer(ScriptedProposer):
    """A proposer of chains, and of several of them merged where a tree is wanted."""

    def __init__(
        self,
        drafts: Callable[[Sequence[int], int], Sequence[int]],
        branches: Callable[[Sequence[int], int], Sequence[Sequence[int]]],
    ) -> None:
        """branches: returns the chains of a tree, like `drafts` one chain."""
        super().__init__(drafts)
        self._branches = branches

    def take(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        wanted = (each for each in requests if not each.wants_tree)
        trees = (self._tree(each) for each in requests if each.wants_tree)
        return [*super().take(list(wanted)), *trees]

    def _tree(self, request: DraftRequest) -> Proposal:
        seq = request.seq
        chains = self._branches(seq.token_ids, request.max_tokens)
        tokens, parents = draft_tree.merged(chains, request.max_nodes)
        tree = None if draft_tree.is_chain(parents) else tuple(parents)
        base = seq.num_tokens, seq.token_ids[-1]
        return Proposal(seq.seq_id, *base, tuple(tokens), parents=tree)


class RecurrentTarget(LossyTarget):
    """A target whose tokens depend on states, and on KV.

    num_hidden: as in StatePool; inputs are the hidden states themselves. salt_of: of a sequence, by
    its id. saved: positions of snapshots, in their order. shared: snapshots that were used with
    another salt.
    """

    def __init__(
        self,
        salt_of: Callable[[int], str] = lambda seq_id: "",
        has_bad_logits: Callable[[], bool] = lambda: False,
        *,
        block_size: int = 1,
        num_seqs: int = 0,
        num_snapshots: int = 0,
        num_hidden: int | None = None,
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
            num_hidden=num_hidden,
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
        self._after: dict[int, dict[Tokens, float]] = {}  # by sequence, then by drafts
        self._present: dict[Tokens, float] = {}  # of the row that is verified
        self._known_end = 0  # of this row
        self.num_nodes = 0  # of trees

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
        state = self._present.get(tuple(context[self._known_end :]))
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
        hidden = self.pool.replay(0, torch.tensor(tokens)[:, None], plan)
        inputs = self.pool.extend(0, hidden, plan)[:, 0].tolist()
        after = self._states_after(inputs, plan)
        for row, span in zip(rows, plan.spans, strict=True):
            self.num_nodes += len(span.parents)
            base = span.first + span.num_replayed + row.num_known_tokens - 1
            states: dict[Tokens, float] = {(): after[base]}
            for node, path in enumerate(row.paths[1:]):
                states[tuple(row.drafts[each] for each in path)] = after[base + 1 + node]
            self._after[row.seq_id] = states

    def _states_after(self, inputs: Sequence[float], plan: StatePlan) -> dict[int, float]:
        """Return the state after each input by its place, and commit states."""
        taps, after, memory = plan.taps, dict[int, float](), self._memory

        def run(state: float, place: int) -> None:
            read = range(place, place + WINDOW + 1) if taps is None else taps[:, place].tolist()
            after[place] = next_state(state, [inputs[each] for each in read])

        for span in plan.spans:
            for place in range(span.first, span.first + span.num_chunked):
                run(float(memory[span.slot]), place)
                memory[span.slot] = after[place]
        states = [float(memory[slot]) for slot in plan.levels.slots]
        for level in plan.levels.levels:
            places = level.places.tolist()
            sources = range(len(places)) if level.sources is None else level.sources.tolist()
            for place, source in zip(places, sources, strict=True):
                run(states[source], place)
            states = [after[place] for place in places]
            for state, slot in level.commits:
                memory[slot] = states[state]
        return after

    def _verify(self, context: list[int], row: StepRow) -> tuple[int, ...]:
        self._present, self._known_end = self._after[row.seq_id], row.known_end
        tokens = super()._verify(context, row)
        self._present, self._known_end = {}, 0
        self.batch.append_output(row, tokens)
        self.batch.keep_paths([row], {row.seq_id: tokens})
        if not tokens:  # bad logits: the state is no number
            self._memory[self.batch.states([row])[0].state_slot] = math.nan
        return tokens


class RecurrentSimulation(Simulation):
    """A history with prefix cache and drafts, with one of them, or without both."""

    target: RecurrentTarget
    num_events = 20
    share_without_drafts = 0.0  # some have none at all, and the others trees

    @cached_property
    def _config(self) -> EngineConfig:
        choose, block_size = self.random.choice, self.random.choice((1, 1, 2, 4))
        longest = MAX_MODEL_LEN // block_size
        return engine_config(
            speculation=_speculation(
                choose((0, 0, 1, 3, MAX_DEPTH)), choose((0, MAX_GUESSES, MAX_GUESSES))
            ),
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
            num_hidden=self.random.choice((None, 1)),
        )

    def _make_engine(self, model: ModelConfig, tokenizer: Tokenizer) -> Engine:
        config, proposer, policy = self._config, None, None
        self._max_num_seqs = self.target.max_num_seqs = config.max_num_seqs
        if config.speculation is not None:
            proposer = self.random.choice((BranchingProposer(self._draft, self._branches), None))
            policy = SpeculationPolicy(
                SpeculationControl("on", 32, 3),
                lambda: self._now_s,
                num_tree_tokens=config.speculation.num_draft_tree_tokens,
            )
        return Engine(
            config, model, self.target, tokenizer, proposer, policy, clock=lambda: self._now_s
        )

    def _branches(self, tokens: Sequence[int], count: int) -> list[list[int]]:
        """Return chains that are right up to a random place, and then often wrong."""
        right, found = self._reference.continuation(tokens, count), list[list[int]]()
        for _ in range(4):
            first = self.random.randrange(count)
            others = [token + self.random.randrange(3) for token in right[first:]]
            found.append([*right[:first], *others])
        return found

    def _recover(self) -> None:
        num_nodes = self.target.num_nodes
        super()._recover()
        self.target.num_nodes = num_nodes

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
