"""Planning of a step's drafts: how many guesses each sequence gets, and what a head drafts next."""

from __future__ import annotations

import collections.abc
from itertools import islice

from specdec.config.engine import EngineConfig
from specdec.config.speculation.method_config import MethodConfig
from specdec.engine.scheduling.scheduled_row import ScheduledRow
from specdec.sequences.sequence import Sequence
from specdec.text.grammar.matcher import MAX_CONSTRAINED_NODES
from specdec.types.control import NO_SPECULATION, SpeculationControl
from specdec.types.drafts.draft_decision import NO_DRAFTS, Decision, DraftShape, chain, tree
from specdec.types.drafts.draft_length import draft_budget, share_budget
from specdec.types.drafts.draft_survival import share_by_survival


class DraftPlanner:
    """Token budget of a step's guesses, divided among its decoding sequences.

    Guesses are draft tokens and the lookahead tokens after them. Their budget is that of the whole
    batch; each sequence has its own number of drafts, and no row is padded to the longest. The
    planner reserves no KV blocks: the scheduler does so for what is planned, or drops it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_model_len = config.max_model_len
        self._most_guesses = (
            config.max_row_guesses if config.keeps_guesses else config.max_model_len
        )
        speculation = config.speculation
        self._length_rule = speculation.length_rule if speculation else None
        self._has_confidences = speculation is not None and speculation.uses_confidences
        self._longest_share = (
            speculation.batch_budget_max if speculation and speculation.batch_budget else None
        )
        self._lookahead_window = speculation.num_lookahead_tokens if speculation else 0
        self._head = speculation.head if speculation else None
        drafters = speculation.rank_drafters if speculation else ()
        self._lookup = next((each for each in drafters if each is not self._head), None)
        self._decision = NO_DRAFTS
        self._control = NO_SPECULATION
        self._has_predictions = False
        self._drafting: frozenset[int] | None = None  # the only sequences that may draft

    def begin_step(
        self, decision: Decision, control: SpeculationControl, *, has_predictions: bool = False
    ) -> None:
        """Plan by these until the next step.

        decision: the draft length of a sequence, for requests that do not choose theirs; 0
            for no drafts of any sequence but those of predicted output, where it allows these.
        control: the settings in force. has_predictions: whether any sequence has predicted output.
        """
        self._decision, self._control = decision, control
        self._drafting = None if decision.num_drafting is None else frozenset()
        self._has_predictions = has_predictions and decision.allows_predictions

    @property
    def may_have_guesses(self) -> bool:
        """Return whether any row of the step may have guesses."""
        return self._decision.num_draft_tokens > 0 or self._has_predictions

    def may_draft_trees(self, sequences: collections.abc.Iterable[Sequence]) -> bool:
        """Return whether any of `sequences` may draft a tree in the step."""
        return self._decision.shape.is_tree and any(
            seq.is_eligible(self._control) and self._may_draft_tree(seq) for seq in sequences
        )

    def plan(
        self, sequences: collections.abc.Sequence[Sequence], most: int | None = None
    ) -> list[ScheduledRow]:
        """Return the rows of all decoding sequences of the step, with their shares of its guesses.

        sequences: by rank; the first ones draft where the decision limits their number.
        most: a lower limit of the step's guesses. Where draft lengths adapt to acceptance, a
        sequence that has none for this decision begins with one.
        """
        self._select(sequences)
        num_guesses_left = draft_budget(self._max_num_batched_tokens, len(sequences))
        if most is not None:
            num_guesses_left = min(num_guesses_left, most)
        wanted = [self._max_draft_tokens(seq) for seq in sequences]
        worth = self._worth_their_rows(sequences, wanted)
        shares = self._shares(sequences, worth, num_guesses_left)
        num_left = num_guesses_left - sum(shares)
        rows = []
        for index, (seq, share) in enumerate(zip(sequences, shares, strict=True)):
            num_left_out = wanted[index] - worth[index] if share == worth[index] else 0
            num_own = num_left // (len(sequences) - index)
            rows.append(self._row(seq, share, num_own, num_left_out))
            num_left -= rows[-1].num_lookahead_tokens
        return rows

    def may_draft(self, seq: Sequence) -> bool:
        """Return whether a sequence is among those that draft by the decision of the step."""
        return self._drafting is None or seq.seq_id in self._drafting

    def _select(self, sequences: collections.abc.Sequence[Sequence]) -> None:
        """Limit the sequences that draft to the first ones that can; the same in each step.

        A head or a draft model then has to catch up with their texts alone.
        """
        limit = self._decision.num_drafting
        if limit is not None:
            able = (
                seq.seq_id
                for seq in sequences
                if seq.is_eligible(self._control) and self._num_useful_guesses(seq)
            )
            self._drafting = frozenset(islice(able, limit))

    @property
    def has_next_drafts(self) -> bool:
        """Return whether the target's ranks draft at the end of the step."""
        is_drafting = self._head is not None or self._lookup is not None
        return is_drafting and self._decision.num_draft_tokens > 0

    def next_draft_shape(self, row: ScheduledRow) -> DraftShape:
        """Return the shape of the draft that could become output after the token of a row.

        The draft length of the next step is the present one, or with a batch budget the longest.
        """
        if not self._drafts_by(self._head, row.seq):
            return chain(0)
        count = self._num_next_draft_tokens(row.seq)
        if not self._may_draft_tree(row.seq):
            return chain(count)
        return tree(count, depth=min(count, self._decision.shape.depth))

    def next_lookup(self, row: ScheduledRow) -> int:
        """Return the tokens that the target's ranks look up after the token of a row."""
        is_wanted = self._drafts_by(self._lookup, row.seq)
        return self._num_next_draft_tokens(row.seq) if is_wanted else 0

    def _drafts_by(self, drafter: MethodConfig | None, seq: Sequence) -> bool:
        """Return whether a method, where it is loaded, is one that drafts for a sequence."""
        return drafter is not None and seq.drafting_method(self._control) in (None, drafter.name)

    def next_chain_length(self, seq: Sequence) -> int:
        """Return the longest chain of drafts in the next step that could become output."""
        count = self._num_next_draft_tokens(seq)
        return min(count, self._decision.shape.depth) if self._may_draft_tree(seq) else count

    def _num_next_draft_tokens(self, seq: Sequence) -> int:
        most = self._max_draft_tokens(seq)
        if self._longest_share is not None:  # the next step's share is not known yet
            most = self._share_limit(seq, most)
        return max(0, min(most, self._num_useful_guesses(seq) - 1))

    def num_slots_of_next_draft(self, row: ScheduledRow, shape: DraftShape) -> int:
        """Return how many KV slots the sequence needs for its next draft; 0 if none is written.

        A head with KV runs the tokens that this step yields and its own drafts after them.
        """
        if self._head is None or not self._head.writes_kv:
            return 0
        if not (shape.num_draft_tokens and row.samples):
            return 0
        num_slots = row.seq.num_tokens + row.num_draft_tokens + 1 + shape.num_head_slots
        return min(num_slots, self._max_model_len)

    def _shares(
        self, sequences: collections.abc.Sequence[Sequence], wanted: list[int], budget: int
    ) -> list[int]:
        """Divide at most `budget` draft tokens among the sequences.

        Only earlier steps decide, as rejection sampling requires.
        """
        if self._longest_share is None:
            return share_budget(wanted, budget)
        rates = [
            self._acceptance_rates(seq, self._share_limit(seq, count))
            for seq, count in zip(sequences, wanted, strict=True)
        ]
        return share_by_survival(rates, min(budget, sum(wanted)))

    def _worth_their_rows(
        self, sequences: collections.abc.Sequence[Sequence], wanted: list[int]
    ) -> list[int]:
        """Return the draft tokens of each sequence that survive often enough, of those wanted."""
        rule = self._decision.slots
        if rule is None:
            return wanted
        return [
            rule.length(seq.acceptance, count)
            if count and self._own_draft_tokens(seq) is None
            else count
            for seq, count in zip(sequences, wanted, strict=True)
        ]

    def _acceptance_rates(self, seq: Sequence, limit: int) -> list[float]:
        """Return the rates of `share_by_survival` of at most `limit` draft tokens."""
        draft = seq.head_draft if self._has_confidences and seq.constraint is None else None
        if draft is None or draft.base_length != seq.num_tokens or draft.parents is not None:
            return [seq.acceptance.rate] * limit
        return [seq.confidence.rate(each) for each in draft.probabilities(limit)]

    def _share_limit(self, seq: Sequence, wanted: int) -> int:
        """Return the most draft tokens of a sequence for which an even share would be `wanted`.

        A number in the request is a limit; without one the draft may be longer than the others.
        """
        assert self._longest_share is not None
        if wanted == 0 or self._own_draft_tokens(seq) is not None:
            return wanted
        return min(self._longest_share, self._num_useful_guesses(seq))

    def _row(
        self, seq: Sequence, num_drafts: int, num_left: int, num_left_out: int
    ) -> ScheduledRow:
        """Return a row whose lookahead fits into `num_left` guesses; without drafts it has none.

        num_left: this sequence's even share of the guess budget that all drafts have left.
        """
        num_lookahead = 0
        if num_drafts and self._lookahead_window:
            num_useful = min(num_left, self._num_useful_guesses(seq) - num_drafts)
            num_lookahead = max(0, min(self._lookahead_window, num_useful))
        max_depth = self._decision.shape.depth if self._may_draft_tree(seq) else None
        return ScheduledRow(
            seq, 1, num_drafts, num_lookahead, max_depth=max_depth, num_left_out=num_left_out
        )

    def _max_draft_tokens(self, seq: Sequence) -> int:
        """Return how many draft tokens step, settings and request allow."""
        if not (self.may_have_guesses and seq.is_eligible(self._control)):
            return 0
        return min(self._wanted_draft_tokens(seq), self._num_useful_guesses(seq))

    def _wanted_draft_tokens(self, seq: Sequence) -> int:
        own = self._own_draft_tokens(seq)
        if own is not None:
            return own
        if not (self._decision.num_draft_tokens and self.may_draft(seq)):
            return 0
        if not self._may_draft_tree(seq):
            return self._draft_length(seq)
        count = self._decision.num_draft_tokens
        return count if seq.constraint is None else min(count, MAX_CONSTRAINED_NODES)

    def _own_draft_tokens(self, seq: Sequence) -> int | None:
        """Return the length of its predicted draft, or the number that the request may choose."""
        if self._has_predictions and (predicted := seq.predicted_draft(self._control)):
            return len(predicted)
        drafts = self._decision.num_draft_tokens > 0 and self.may_draft(seq)
        may_choose = drafts and self._control.allow_request_override
        return seq.params.speculation.num_speculative_tokens if may_choose else None

    def _may_draft_tree(self, seq: Sequence) -> bool:
        """Return whether a tree is decided, for a sequence that takes the decision."""
        return (
            self._decision.shape.is_tree
            and seq.rules.acting_verifier == "coupled"
            and self._own_draft_tokens(seq) is None
        )

    def _draft_length(self, seq: Sequence) -> int:
        """Return the step's draft length, or the sequence's own that adapts to acceptance."""
        most, first = self._decision.shape.depth, self._decision.first_length
        if self._length_rule is None:
            return most
        if first is None:
            first, most = most, self._length_rule.longest(most)
        seq.draft_length = self._length_rule.begin(seq.draft_length, first)
        return min(most, seq.draft_length.num_tokens)

    def _num_useful_guesses(self, seq: Sequence) -> int:
        """Return how many guesses could still become output, beside a token of the target.

        Of pending drafts none may be accepted; if more are, `StepRow.max_end` cuts held drafts.
        """
        num_tokens = seq.num_tokens - seq.num_pending_drafts
        num_left = seq.max_length(self._max_model_len) - num_tokens - 1
        return max(0, min(num_left, self._most_guesses))
