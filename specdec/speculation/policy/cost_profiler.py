"""Cost profiler: measures steps on the loaded models before the first request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, repeat
from typing import NamedTuple

from specdec.config.engine import DraftLimits, EngineConfig
from specdec.speculation.policy.cost_table import CostTable
from specdec.types.draft_messages import DraftRow, DraftStep
from specdec.types.drafts.draft_decision import DraftShape, chain, tree, trees
from specdec.types.messages import RowDrafting, StepInput, StepRow
from specdec.types.ranks import DraftWorker, Target
from specdec.types.trial_sequences import TrialSequences

_CONTEXT_TOKENS = 64
_TOKEN = 1
_NUM_TOKEN_IDS = 100
"""Different tokens in a measured step without a text, with ids that every vocabulary has."""

_MAX_CONTEXTS = 16
"""Sequences that continue a text, beyond which several have the KV of the same context."""

_CONTEXT_STRIDE = 37
"""Tokens from the place of a sequence in the text to that of the next one."""

_BATCH_SIZES = (1, 4, 16, 64, 128, 256, 512, 1024)
"""Dense where a GPU leaves the range in which the time of a pass hardly depends on its rows."""

_BATCH_SIZES_OF_MIXTURES = tuple(2**exponent for exponent in range(11))
_ROUNDS = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Parts of the budget by whose end each round over the steps ends."""

_MANY_ROWS, _AS_LONG = 64, 0.9
"""See `_costs_by_rows`."""


class TargetCosts(NamedTuple):
    """Seconds of a target's steps, and of `begin` alone: the host packs and launches them there."""

    steps: CostTable
    begin: CostTable


class ProfiledStep(NamedTuple):
    """Number of sequences in a step, and of draft tokens of each."""

    num_sequences: int
    num_draft_tokens: int

    @property
    def num_rows(self) -> int:
        """Tokens that a target runs."""
        return self.num_sequences * (1 + self.num_draft_tokens)


@dataclass(frozen=True)
class CostProfiler:
    """Profiler of steps with up to `most` draft tokens, on workers without sequences.

    The KV of its sequences is uninitialized, and in a small pool several share a block: the work is
    the same.
    text, draft_text: token ids for the target, and for the draft model in its own vocabulary, if
        it is a mixture of experts, else empty. Which experts a token reads depends on the token and
        those before it, so the sequences continue pieces of the text, with its KV. More batch sizes
        are measured then, since with the rows of a step the experts that it reads grow ever slower.
    with_head: whether a head on the target's ranks drafts in the steps with drafts: trees, where
    they are configured, of more tokens than the longest chain.
    """

    config: EngineConfig
    most: int
    clock: Callable[[], float]
    with_head: bool = False
    text: tuple[int, ...] = ()
    draft_text: tuple[int, ...] = ()

    def verification(self, target: Target, budget_s: float) -> TargetCosts:
        """Measure the target's steps for about `budget_s` seconds. Raise TargetFailedError."""
        sequences, start = self._sequences(self.config.num_blocks, self.text), self._context_tokens

        def run(step: StepInput) -> float:
            began_at_s = self.clock()
            target.begin(step)
            begun_at_s = self.clock()
            target.collect()
            return begun_at_s - began_at_s

        def verify(step: ProfiledStep) -> float:
            drafting = self._drafting(step.num_draft_tokens)
            rows = tuple(
                StepRow(
                    seq_id,
                    start,
                    _tokens(self.text, seq_id, start, 1 + step.num_draft_tokens),
                    step.num_draft_tokens,
                    samples=True,
                    drafting=drafting,
                )
                for seq_id in sequences.seq_ids[: step.num_sequences]
            )
            return run(StepInput(0, (), (), (), rows))

        run(sequences.admit())
        try:
            for rows in self._contexts(
                sequences.seq_ids, self.text, self.config.max_num_batched_tokens
            ):
                run(StepInput(0, (), (), (), rows))
            for rows in self._catch_up(sequences.seq_ids) if self.with_head else ():
                run(StepInput(0, (), (), (), rows))
            return self._measure(verify, budget_s, smallest=0, has_text=bool(self.text))
        finally:
            run(sequences.release())

    def _contexts(
        self, seq_ids: Sequence[int], text: Sequence[int], most_tokens: int
    ) -> Iterator[tuple[StepRow, ...]]:
        """Yield rows by which a model computes the KV of the text; none without one.

        most_tokens: of a step, if that is enough for a sequence.
        """
        count = self._context_tokens
        size = max(1, most_tokens // count)
        firsts = range(0, min(len(seq_ids), _MAX_CONTEXTS), size) if text else ()
        for first in firsts:
            yield tuple(
                StepRow(seq_id, 0, _tokens(text, seq_id, 0, count), 0, samples=False)
                for seq_id in seq_ids[first : min(first + size, _MAX_CONTEXTS)]
            )

    def _catch_up(self, seq_ids: Sequence[int]) -> Iterator[tuple[StepRow, ...]]:
        """Yield rows by which a head with KV computes its KV of the context."""
        start, most_tokens = self._context_tokens, self.config.max_num_batched_tokens
        size = max(1, most_tokens // (start + 1))
        for first in range(0, len(seq_ids), size):
            rows = tuple(
                StepRow(
                    seq_id,
                    start,
                    _tokens(self.text, seq_id, start, 1),
                    0,
                    samples=True,
                    drafting=RowDrafting(num_next=1),
                )
                for seq_id in seq_ids[first : first + size]
            )
            yield from repeat(rows, -(-(start + 1) // most_tokens))

    def drafting(self, worker: DraftWorker, limits: DraftLimits, budget_s: float) -> CostTable:
        """Measure the drafts of a model with these limits. Raise DraftFailedError."""
        own = self._within(limits.max_model_len)
        text, start = self.draft_text, own._context_tokens
        sequences = own._sequences(limits.num_blocks, text)

        def draft(step: ProfiledStep) -> float:
            drafts = tuple(
                DraftRow(
                    seq_id, start, _tokens(text, seq_id, start, 1), step.num_draft_tokens, start + 1
                )
                for seq_id in sequences.seq_ids[: step.num_sequences]
            )
            worker.begin(DraftStep(0, (), (), (), (), drafts))
            worker.collect()
            return 0.0

        worker.begin(DraftStep(0, (), sequences.admissions, sequences.block_tables, (), ()))
        try:
            for rows in own._contexts(sequences.seq_ids, text, limits.max_catch_up_tokens):
                worker.begin(DraftStep(0, (), (), (), rows, ()))
            return own._measure(draft, budget_s, smallest=1, has_text=bool(text)).steps
        finally:
            worker.begin(DraftStep(0, sequences.seq_ids, (), (), (), ()))

    def _within(self, max_model_len: int) -> CostProfiler:
        """Return this profiler, or one for the context of a draft model if that is shorter."""
        if max_model_len >= self.config.max_model_len:
            return self
        config = replace(self.config, max_model_len=max_model_len)
        return replace(self, config=config, most=max(1, min(self.most, max_model_len - 2)))

    def _next_draft(self, num_draft_tokens: int) -> DraftShape:
        """Return the shape of the draft that a head makes in a step with `num_draft_tokens`."""
        if not self.with_head:
            return chain(0)
        largest = next(iter(_trees(self.config)), chain(num_draft_tokens))
        return tree(num_draft_tokens, min(largest.depth, num_draft_tokens))

    def _drafting(self, num_draft_tokens: int) -> RowDrafting:
        draft = self._next_draft(num_draft_tokens)
        return RowDrafting(
            num_next=draft.num_draft_tokens,
            next_depth=draft.depth if draft.is_tree else 0,
            num_lookup=draft.num_draft_tokens,
        )

    @property
    def _num_guess_slots(self) -> int:
        """KV slots that a step may write after the last known token of a sequence.

        A head writes its own after the token that the step yields after the accepted drafts.
        """
        if not self.with_head:
            return self.most
        counts = _counts(self.config, self.most, smallest=0)
        return self.most + 1 + max(self._next_draft(count).num_head_slots for count in counts)

    @property
    def _context_tokens(self) -> int:
        longest = self.config.max_model_len - self._num_guess_slots - 1
        return max(1, min(_CONTEXT_TOKENS, longest))

    def _sequences(self, num_blocks: int, text: Sequence[int]) -> TrialSequences:
        """Return one sequence for each seat of the batch, in a pool of `num_blocks`."""
        num_tokens = self._context_tokens
        num_slots = num_tokens + 1 + self._num_guess_slots
        if text:
            num_blocks = min(num_blocks, _MAX_CONTEXTS * -(-num_slots // self.config.block_size))
        return TrialSequences(
            [(_TOKEN,) * num_tokens] * self.config.max_num_seqs,
            num_slots,
            self.config.block_size,
            num_blocks,
        )

    def _measure(
        self,
        run: Callable[[ProfiledStep], float],
        budget_s: float,
        *,
        smallest: int,
        has_text: bool,
    ) -> TargetCosts:
        """Return the tables for `smallest` or more draft tokens.

        run: returns the seconds of `begin`.
        """
        shapes = StepShapes.of(self.config, self.most, smallest, has_text=has_text)
        measured = self._seconds(run, shapes.steps(), budget_s)
        steps, begin = ({step: each[part] for step, each in measured.items()} for part in (0, 1))
        return TargetCosts(shapes.table(steps), shapes.table(begin))

    def _seconds(
        self, run: Callable[[ProfiledStep], float], steps: Sequence[ProfiledStep], budget_s: float
    ) -> dict[ProfiledStep, tuple[float, float]]:
        """Return the seconds of each step, and of its begin.

        They are the minimum over a few rounds, since other load on the machine only adds time. Each
        round begins with the cheapest steps, and may take longer than the one before: where the
        budget does not suffice for all steps in each, those that single requests run are measured
        several times nevertheless, apart from each other. A round ends where all larger steps cost
        by their rows, as a step shows twice: the first round also warms up each one.
        """
        started_at_s, seconds = self.clock(), dict[ProfiledStep, tuple[float, float]]()
        for part in _ROUNDS:
            for step in steps:
                if seconds and self.clock() - started_at_s > part * budget_s:
                    break
                if all(self._costs_by_rows(run, step, seconds) for _ in range(2)):
                    break
        return seconds

    def _costs_by_rows(
        self,
        run: Callable[[ProfiledStep], float],
        step: ProfiledStep,
        seconds: dict[ProfiledStep, tuple[float, float]],
    ) -> bool:
        """Run a step, and return whether larger ones cost by their rows."""
        begun_at_s = self.clock()
        begin_s = run(step)
        found = (self.clock() - begun_at_s, begin_s)
        seconds[step] = min(seconds.get(step, (math.inf, 0.0)), found)
        return _costs_by_rows(step, seconds)


def _costs_by_rows(step: ProfiledStep, seconds: Mapping[ProfiledStep, tuple[float, float]]) -> bool:
    """Return whether a large pass takes as long a row as one over at most half of the rows.

    Arithmetic bounds both then. A draft model's steps, of several passes, are not compared.
    """
    if step.num_draft_tokens or step.num_rows < _MANY_ROWS:
        return False
    row_s = seconds[step][0] / step.num_rows
    return any(
        each_s / each.num_rows < row_s / _AS_LONG
        for each, (each_s, _) in seconds.items()
        if not each.num_draft_tokens and 2 * each.num_rows <= step.num_rows
    )


@dataclass(frozen=True)
class StepShapes:
    """The shapes of steps to measure: batch sizes, and draft tokens of each sequence.

    max_rows: of a step; larger ones are not measured.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    max_rows: int

    @classmethod
    def of(
        cls, config: EngineConfig, most: int, smallest: int, *, has_text: bool = False
    ) -> StepShapes:
        """Return those with `smallest` to `most` draft tokens. has_text: see CostProfiler.text."""
        largest = config.max_num_seqs
        choices = _BATCH_SIZES_OF_MIXTURES if has_text else _BATCH_SIZES
        sizes = (*(size for size in choices if size < largest), largest)
        return cls(sizes, _counts(config, most, smallest), config.max_num_batched_tokens)

    def steps(self) -> list[ProfiledStep]:
        """Return the steps, cheapest first."""
        steps = [ProfiledStep(*each) for each in product(self.sizes, self.counts)]
        steps = [each for each in steps if each.num_rows <= self.max_rows]
        return sorted(steps, key=lambda step: (step.num_rows, step.num_draft_tokens))

    def table(self, measured: Mapping[ProfiledStep, float]) -> CostTable:
        """Return the table of measured seconds.

        Steps without a measurement cost the largest measured one's time a row.
        """
        largest = max(measured, key=lambda step: step.num_rows)
        row_s = measured[largest] / largest.num_rows

        def cost(step: ProfiledStep) -> float:
            # A clock may be too coarse to see a step at all.
            return max(measured.get(step, row_s * step.num_rows), 1e-9)

        seconds = tuple(
            tuple(cost(ProfiledStep(size, count)) for count in self.counts) for size in self.sizes
        )
        return CostTable(self.sizes, self.counts, seconds)


def _counts(config: EngineConfig, most: int, smallest: int) -> tuple[int, ...]:
    """Return the numbers of draft tokens to measure: of chains, and of trees if there are any."""
    grown = _trees(config)
    between = grown[0].depth if grown else most // 2
    of_trees = (each.num_draft_tokens for each in grown)
    return tuple(sorted({n for n in (0, 1, between, most, *of_trees) if smallest <= n <= most}))


def _trees(config: EngineConfig) -> tuple[DraftShape, ...]:
    """Return the trees that a policy may choose, the largest first; none where there are chains."""
    if (speculation := config.speculation) is None:
        return ()
    sizes = speculation.num_draft_tree_tokens, speculation.num_speculative_tokens
    return trees(*sizes, is_fixed=bool(speculation.head and speculation.head.tree_choices))


def with_engine(
    target: TargetCosts, engine: CostTable, *, overlaps: bool, num_held_drafts: int = 0
) -> CostTable:
    """Return the seconds of steps with the engine's own, in which the target waits.

    overlaps: whether the host works during a forward pass after a step without draft tokens, as
    with asynchronous scheduling. Then the longer one of the two counts for these steps: the target,
    or the engine and the begin of the next step.
    num_held_drafts: most draft tokens after which it does too, since the target's ranks hold the
    next ones.
    """

    def whole(size: int, count: int, value: float) -> float:
        engine_s = engine.step_s(size, count)
        if not overlaps or count > num_held_drafts:
            return value + engine_s
        begin_s = target.begin.step_s(size, count)
        return max(value - begin_s, engine_s + begin_s)

    return target.steps.mapped(whole)


def with_drafting(verification: CostTable, drafting: CostTable) -> CostTable:
    """Return the sum of both tables; without draft tokens the draft model does not run."""
    return verification.mapped(
        lambda size, count, value: value + (drafting.step_s(size, count) if count else 0.0)
    )


def _tokens(text: Sequence[int], seq_id: int, start: int, count: int) -> tuple[int, ...]:
    """Return tokens of a sequence from position `start` on; without a text any."""
    if not text:
        return _token_ids(seq_id, count)
    first = _CONTEXT_STRIDE * seq_id + start
    return tuple(text[place % len(text)] for place in range(first, first + count))


def _token_ids(seq_id: int, count: int) -> tuple[int, ...]:
    """Return tokens of a row that differ from each other and from those of other sequences."""
    first = 37 * seq_id
    return tuple(1 + (first + index) % _NUM_TOKEN_IDS for index in range(count))
