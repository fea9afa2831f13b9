"""Connects the engine to the proposer and the speculation policy."""

from __future__ import annotations

import collections.abc
from collections import Counter
from collections.abc import Callable, Mapping

from specdec.config.speculation.methods import DraftModelConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.scheduling.ahead_gain import AheadGain
from specdec.engine.scheduling.async_scheduling import CollectedStep
from specdec.engine.scheduling.decode_run import Rows
from specdec.engine.scheduling.drafting import NO_DRAFTING, Drafting
from specdec.engine.scheduling.scheduled_row import ScheduledRow
from specdec.sequences.decode_rows import RepeatedRows
from specdec.sequences.prediction import METHOD as PREDICTION
from specdec.sequences.sequence import Sequence
from specdec.speculation.policy.expected_goodput import GoodputEstimate
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import (
    AheadProposer,
    DraftRequest,
    Proposal,
    Proposer,
    SentRow,
)
from specdec.types.control import NO_SPECULATION, SpeculationControl
from specdec.types.drafts.draft_decision import (
    NO_DRAFTS,
    NO_PROMPTS,
    Decision,
    DecisionReason,
    DraftAhead,
    PromptLoad,
    tree,
)
from specdec.types.drafts.draft_tree import chain_of
from specdec.types.drafts.slot_rule import KEPT_EVIDENCE
from specdec.types.messages import StepRow
from specdec.types.reports.stats import STRUCTURED_OUTPUT, Counts

_OF_DRAFT_MODEL = (None, DraftModelConfig.name)
"""Method of a draft model's proposals, alone and in a cascade."""


class Speculator:
    """Asks the policy for draft lengths and the proposer for drafts, and reports the outcome.

    The engine calls for each step, in this order: `decide`, `take` where drafts are allowed,
    `begin_step`, `ahead`, and with its results `observe` for each verified row, then `end_step`;
    of a step that is begun ahead without drafts, `begin_step` only where there is a policy.

    holds_drafts: whether the target's ranks hold the drafts for a step begun ahead.
    """

    def __init__(
        self,
        config: SpeculativeConfig | None,
        proposer: Proposer | None,
        policy: SpeculationPolicy | None,
        *,
        begins_ahead: bool = False,
    ) -> None:
        """config: None where drafting is not allowed. proposer: None where nothing drafts.

        policy: None drafts as configured at every load. begins_ahead: whether steps may.
        """
        self.policy = policy
        self._config = config
        self._proposer = proposer
        self._configured = config.control if config else NO_SPECULATION
        self._length_rule = config.length_rule if config else None
        self._has_batch_budget = config is not None and config.batch_budget is True
        self._divides_slots = config is not None and policy is not None and config.divides_slots
        self._has_confidences = config is not None and config.uses_confidences
        self.holds_drafts = config is not None and config.holds_drafts
        self._drafting = NO_DRAFTING  # of the oldest step in flight
        self._gain: AheadGain | None = None
        if begins_ahead and isinstance(proposer, AheadProposer) and proposer.guesses_outcomes:
            self._gain = AheadGain()
        self._decodes_alone = False  # that step, if it was decided for what it runs
        # Rows of the committed step, by tokens wanted, drafted and accepted, and whether of a tree.
        self._outcomes: Counter[tuple[int, int, int, bool]] = Counter()
        self._observed: list[Sequence] = []  # the sequences of these rows

    @property
    def control(self) -> SpeculationControl:
        """The settings in force: the policy's, or without one the configured ones."""
        return self.policy.control if self.policy else self._configured

    def set_control(self, control: SpeculationControl) -> None:
        """Put settings in force from the next step on."""
        assert self.policy is not None, "an engine without a policy has fixed settings"
        self.policy.update(control)

    @property
    def is_on(self) -> bool:
        """Return whether a request without speculation options gets drafts."""
        return self.policy.is_on if self.policy else self._proposer is not None

    @property
    def estimate(self) -> GoodputEstimate | None:
        """The policy's estimate of the last decision; None without one."""
        return self.policy.estimate if self.policy else None

    def decide(
        self, num_decoding: int = 0, num_eligible: int = 0, prompts: PromptLoad = NO_PROMPTS
    ) -> Decision:
        """Return how much a sequence may draft in the next step; see `SpeculationPolicy.decide`.

        Without a policy the load makes no difference.
        """
        self._drafting = NO_DRAFTING
        if self._proposer is None or self._config is None:
            return NO_DRAFTS
        if self.policy is None:
            config = self._config
            depth = config.num_speculative_tokens
            return Decision(
                tree(config.num_draft_tree_tokens, depth=depth).with_ahead(config.draft_ahead),
                DecisionReason.OPERATOR,
            )
        return self.policy.decide(num_decoding, num_eligible, prompts)

    def add_to(self, counts: Counts) -> None:
        """Add what the policy has counted and measured."""
        if self.policy is not None:
            counts.decisions = {each.value: n for each, n in self.policy.log.counts.items()}
            counts.decided_lengths = self.policy.log.lengths
            observed = self.policy.observed
            counts.measured_s, counts.profiled_s = observed.measured, observed.profiled
            counts.spent_s, counts.undrafted_s = observed.spent, observed.undrafted

    def take(
        self,
        rows: collections.abc.Sequence[ScheduledRow],
        *,
        may_wait: bool = True,
        uses_proposer: bool = True,
    ) -> Drafting:
        """Return the drafts for those of `rows` that have any; predicted output comes first.

        may_wait: whether the step may wait for drafts that are not there yet.
        uses_proposer: False for drafts of predicted output alone.
        """
        if not rows or self._proposer is None or self._config is None:
            return NO_DRAFTING
        requests = self._requests(rows, may_wait=may_wait)
        if predicted := self._predicted(rows):
            requests = [
                each._replace(max_tokens=0, max_nodes=0, max_lookahead_tokens=0)
                if each.seq.seq_id in predicted
                else each
                for each in requests
            ]
        proposals: dict[int, Proposal] = {}
        if uses_proposer:
            proposals = {each.seq_id: each for each in self._proposer.take(requests)}
        proposals |= predicted
        methods = {
            seq_id: each.method or self._config.method
            for seq_id, each in proposals.items()
            if each.draft_token_ids
        }
        trees = frozenset(each.seq.seq_id for each in requests if each.wants_tree)
        has_waited = self._config.draft_model is not None and any(
            each.draft_token_ids and not each.is_ahead and each.method in _OF_DRAFT_MODEL
            for each in proposals.values()
        )
        work = frozenset(each.work for each in proposals.values() if each.work is not None)
        requested = _num_requested(requests)
        return Drafting(proposals, {}, requested, trees, methods, has_waited, work=work)

    def _predicted(self, rows: collections.abc.Sequence[ScheduledRow]) -> dict[int, Proposal]:
        """Return the drafts of predicted output, by sequence."""
        proposals = {}
        for row in rows:
            seq = row.seq
            if seq.prediction is None or not row.num_draft_tokens:
                continue
            if draft := seq.predicted_draft(self.control):
                base = seq.num_tokens, seq.token_ids[-1]
                proposals[seq.seq_id] = Proposal(seq.seq_id, *base, draft, method=PREDICTION)
        return proposals

    def guessed(self, in_flight: Rows) -> Mapping[int, tuple[int, ...]] | None:
        """Return the drafts in flight, by sequence, where it pays to guess that all are kept."""
        return None if self._gain is None else self._gain.guessed(in_flight)

    def note_no_guess(self) -> None:
        """Take note that the step after `guessed` could not begin ahead."""
        if self._gain is not None:
            self._gain.note_failure()

    def propose_ahead(
        self,
        rows: collections.abc.Sequence[ScheduledRow],
        guessed: Mapping[int, tuple[int, ...]] | None = None,
    ) -> Drafting | None:
        """Return the drafts for a step ahead of the one in flight; None where they are not known.

        The pending token of a row selects its draft, or the target's ranks have it. A draft model
        catches up on rows without drafts as it does for any step. guessed: as the method returns.
        """
        if not any(row.num_draft_tokens for row in rows):
            return self.take(rows)
        if not isinstance(self._proposer, AheadProposer) or self._config is None:
            return None
        if self._has_confidences:
            return None  # they divide the budget, and arrive with the drafts
        if self._proposer.guesses_outcomes and guessed is None:
            return None
        requests = self._requests(rows)
        if guessed is not None:
            requests = [
                each._replace(pending_drafts=guessed.get(each.seq.seq_id, ())) for each in requests
            ]
        ahead = self._proposer.propose_ahead(requests)
        if ahead is None:
            return None
        by_sequence = {each.seq_id: each for each in ahead}
        methods = {each.seq_id: each.method or self._config.method for each in ahead}
        trees = frozenset(each.seq.seq_id for each in requests if each.wants_tree)
        requested, is_guessed = _num_requested(requests), guessed is not None
        return Drafting({}, by_sequence, requested, trees, methods, is_guessed=is_guessed)

    def ahead(
        self,
        rows: collections.abc.Sequence[tuple[Sequence, StepRow]],
        num_next_tokens: Callable[[Sequence], int],
        ahead: DraftAhead,
        *,
        may_wait: bool,
    ) -> None:
        """Have the proposer draft after rows that were sent, for the step after them.

        num_next_tokens: most draft tokens of a sequence in that step. may_wait: whether that step
            may wait for drafts, if it has as many rows.
        """
        if self._proposer is None:
            return
        control = self.control
        self._proposer.ahead(
            [
                SentRow(
                    seq,
                    row.known_end,
                    chain_of(row.drafts, row.drafting.parents),
                    num_next_tokens(seq),
                    seq.drafting_method(control),
                    ahead,
                    may_wait,
                )
                for seq, row in rows
                if row.samples and seq.is_eligible(control)
            ]
        )

    def _requests(
        self, rows: collections.abc.Sequence[ScheduledRow], *, may_wait: bool = True
    ) -> list[DraftRequest]:
        control = self.control
        return [
            DraftRequest(
                row.seq,
                row.draft_depth,
                row.num_lookahead_tokens,
                row.seq.drafting_method(control),
                row.num_draft_tokens,
                may_wait,
            )
            for row in rows
        ]

    def begin_step(
        self,
        rows: collections.abc.Sequence[StepRow],
        drafting: Drafting,
        *,
        is_as_decided: bool = True,
    ) -> None:
        """Take note of a step, and report it to the policy unless it only prefills.

        is_as_decided: False for a step that was begun under another decision than the last one.
        """
        self._drafting = drafting
        self._decodes_alone = False
        if not is_as_decided or (self.policy is None and self._gain is None):
            return
        if isinstance(rows, RepeatedRows):
            if self.policy is not None:
                has_prefill = any(len(row.token_ids) > 1 or not row.samples for row in rows.joining)
                self.policy.begin_step(0, 0, has_prefill=has_prefill)
            return
        decoding = [row for row in rows if row.samples and row.num_known_tokens == 1]
        self._decodes_alone = len(decoding) == len(rows)
        if not decoding or self.policy is None:
            return
        requested, num_requested = drafting.num_requested, 0
        if requested:
            num_requested = sum(requested.get(row.seq_id, 0) > 0 for row in decoding)
        num_drafted = sum(row.num_draft_tokens > 0 for row in decoding)
        if drafting.is_guessed:
            num_drafted = num_requested  # the others are not guessed, and wait for no draft model
        # The time of a step with predicted output, whose drafts are longer, is not of its decision.
        is_irregular = len(decoding) < len(rows) or PREDICTION in drafting.methods.values()
        waited_s = drafting.waited_s if drafting.has_waited else None
        self.policy.begin_step(
            num_requested,
            num_drafted,
            has_prefill=is_irregular,
            waited_s=waited_s,
            num_slots=drafting.num_slots(decoding),
        )

    def drafting_method(self, seq_id: int) -> str:
        """Return the method that a row's draft counts for, even if a grammar has extended it."""
        return self._drafting.methods.get(seq_id, STRUCTURED_OUTPUT)

    @property
    def observes_undrafted(self) -> bool:
        """Return whether `observe` does anything for rows of the committed step without drafts."""
        return self._drafting is not NO_DRAFTING or self._has_batch_budget

    def observe(self, seq: Sequence, depth: int, num_accepted: int) -> None:
        """Adapt draft length and policy to the outcome of a row's draft, of at most `depth` tokens.

        Trees do not change a sequence's draft length, which is that of chains. The policy ignores
        requests that chose another method than the one in force, and drafts of predicted output,
        which are no evidence about what the proposer drafts.
        """
        if self._drafting.methods.get(seq.seq_id) == PREDICTION:
            assert seq.prediction is not None, "a predicted draft without a prediction"
            seq.prediction.observe(depth, num_accepted)
            return
        is_tree = seq.seq_id in self._drafting.trees
        if self._length_rule is not None and seq.draft_length is not None and not is_tree:
            seq.draft_length = self._length_rule.after(seq.draft_length, depth, num_accepted)
        num_requested = self._drafting.num_requested.get(seq.seq_id, 0)
        is_missed = self._drafting.is_guessed and not depth  # no evidence about the sequence
        if self._divides_slots and not (is_tree or is_missed):
            seq.acceptance = seq.acceptance.after(num_requested, num_accepted, KEPT_EVIDENCE)
        if self._has_batch_budget and not is_missed:
            seq.acceptance = seq.acceptance.after(num_requested, num_accepted)
            seq.confidence = seq.confidence.after(self._confidences(seq, depth), num_accepted)
        if self._drafting.num_left_out is not None:  # they count as rejected
            num_requested += self._drafting.num_left_out.get(seq.seq_id, 0)
        if self.policy is None or not num_requested:
            return
        control = self.control
        if seq.drafting_method(control) == control.method:
            self._outcomes[num_requested, depth, num_accepted, is_tree] += 1
            self._observed.append(seq)

    def _confidences(self, seq: Sequence, depth: int) -> list[float]:
        """Return the head's confidences in the `depth` draft tokens of a row; none in others'."""
        draft, is_own = seq.head_draft, seq.seq_id in self._drafting.methods
        if not self._has_confidences or draft is None or not is_own:
            return []
        return draft.probabilities(depth)

    def end_step(self, step: CollectedStep) -> None:
        """Report to the policy and the proposer that all rows of the step were observed."""
        if self._gain is not None and self._drafting is not NO_DRAFTING:
            is_guessed = self._drafting.is_guessed
            self._gain.end_step(step, is_guessed=is_guessed, decodes_alone=self._decodes_alone)
        if self.policy is not None:
            self._report_outcomes(self.policy)
            self.policy.end_step(lambda: [seq.acceptance for seq in self._observed])
            self._observed.clear()
        if self._proposer is not None:
            self._proposer.end_step()

    def _report_outcomes(self, policy: SpeculationPolicy) -> None:
        """Report the rows of the step; those with the same outcome together."""
        for (num_requested, depth, num_accepted, is_tree), count in self._outcomes.items():
            policy.observe_rows(count, num_requested, depth, num_accepted, is_tree=is_tree)
        self._outcomes.clear()

    def forget_step(self) -> None:
        """Report to the policy and the proposer that the steps in flight are lost."""
        self._outcomes.clear()
        self._observed.clear()
        if self.policy is not None:
            self.policy.forget_step()
        if self._proposer is not None:
            self._proposer.end_step(is_lost=True)

    def release(self, seq_id: int) -> None:
        """Have the proposer drop a sequence that lost its blocks."""
        if self._proposer is not None:
            self._proposer.release(seq_id)


def _num_requested(requests: collections.abc.Sequence[DraftRequest]) -> dict[int, int]:
    return {each.seq.seq_id: each.max_tokens for each in requests}
