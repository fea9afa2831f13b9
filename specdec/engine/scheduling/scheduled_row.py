"""A sequence's part of a step, and the tokens that the target runs for it."""

from __future__ import annotations

from typing import NamedTuple

from specdec.sequences.sequence import Sequence
from specdec.sequences.state_snapshots import StateSnapshots
from specdec.speculation.proposers import Proposal
from specdec.types.drafts.draft_decision import DraftShape
from specdec.types.drafts.draft_tree import chain_of, is_chain, require_tree
from specdec.types.messages import DraftProbs, RowDrafting, StepRow, head_drafting


class ScheduledRow(NamedTuple):
    """A sequence's part of a step: its next `num_tokens`, and KV slots for guesses after them.

    num_next_drafts, next_draft_depth, num_lookup: as num_next, next_depth and num_lookup in
        RowDrafting.
    max_depth: where its draft may be a tree, most draft tokens that follow each other; None for a
        chain.
    num_left_out: further draft tokens that the decision allows, and that are not worth their rows.
    """

    seq: Sequence
    num_tokens: int
    num_draft_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_next_drafts: int = 0
    max_depth: int | None = None
    next_draft_depth: int = 0
    num_lookup: int = 0
    num_left_out: int = 0

    @classmethod
    def of_prompt(
        cls, seq: Sequence, budget: int, snapshots: StateSnapshots | None
    ) -> ScheduledRow:
        """Return the next tokens of a prompt, at most `budget`, up to one worth a snapshot."""
        count = min(seq.num_uncomputed_tokens, budget)
        if snapshots is not None:
            count = snapshots.cut(seq.seq_id, seq.num_computed_tokens, count)
        return cls(seq, count)

    @property
    def num_guesses(self) -> int:
        """Draft and lookahead tokens."""
        return self.num_draft_tokens + self.num_lookahead_tokens

    @property
    def draft_depth(self) -> int:
        """Most draft tokens that follow each other."""
        most = self.num_draft_tokens
        return most if self.max_depth is None else min(most, self.max_depth)

    @property
    def samples(self) -> bool:
        """Return whether the row reaches the last known token, so that a new token is sampled."""
        return self.num_tokens == self.seq.num_uncomputed_tokens

    def with_next_draft(self, shape: DraftShape, num_lookup: int) -> ScheduledRow:
        """Return the row with the shape of the draft that a head makes at the end of the step.

        num_lookup: as in RowDrafting.
        """
        return self._replace(
            num_next_drafts=shape.num_draft_tokens,
            next_draft_depth=shape.depth if shape.is_tree else 0,
            num_lookup=num_lookup,
        )

    @property
    def next_drafting(self) -> tuple[int, int, int]:
        """The fields of RowDrafting about what the rank drafts at the end of the step."""
        return self.num_next_drafts, self.next_draft_depth, self.num_lookup

    def step_row(self, proposal: Proposal | None) -> StepRow:
        """Return the tokens to run: the known ones, then the drafts unless they are stale.

        Raises GrammarError where the sequence's structured output cannot continue.
        """
        seq, start = self.seq, self.seq.num_computed_tokens
        drafts: tuple[int, ...] = ()
        lookahead: tuple[int, ...] = ()
        draft_probs, mask, parents = None, None, None
        if proposal is not None and _continues(proposal, seq):
            drafts, parents = _verifiable(proposal, self.num_draft_tokens, seq)
            lookahead = proposal.lookahead_token_ids[: self.num_lookahead_tokens]
            if proposal.draft_probs is not None:
                draft_probs = proposal.draft_probs[slice(len(drafts))]
        if seq.constraint is not None and self.samples:
            seq.constraint.follow(seq.token_ids)
            if draft_probs is not None:
                constrained = seq.constraint.along(drafts)
            elif parents is not None:
                constrained = seq.constraint.prune(drafts, parents, self.num_draft_tokens)
            else:
                constrained = seq.constraint.extend(drafts, self.num_draft_tokens)
            drafts, mask = constrained.token_ids, constrained.masks
            parents = constrained.parents
        known = tuple(seq.token_ids[start : start + self.num_tokens])
        return StepRow(
            seq.seq_id,
            start,
            known + drafts + lookahead,
            len(drafts),
            self.samples,
            self._drafting(draft_probs, parents),
            mask,
            len(lookahead),
            seq.request.adapter_id,
        )

    def _drafting(self, probs: DraftProbs | None, parents: tuple[int, ...] | None) -> RowDrafting:
        """Return the drafting of the row; chains without probabilities share it."""
        head = (0, 0, *self.next_drafting)
        if probs is None and parents is None:
            return head_drafting(*head)
        return RowDrafting(probs, parents, (), *head)


def _verifiable(
    proposal: Proposal, num_draft_tokens: int, seq: Sequence
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the first drafts of a proposal, and their tree, as the sequence's verifier takes them.

    Only the coupled verifier walks trees; others get the first path of a tree. Acceptance tests
    token by token, which they use, are defined for one draft at each position.
    """
    drafts = proposal.draft_token_ids[:num_draft_tokens]
    if proposal.parents is None:
        return drafts, None
    assert not proposal.lookahead_token_ids, "a tree with lookahead tokens"
    assert proposal.draft_probs is None, "a tree with draft probabilities"
    parents = proposal.parents[: len(drafts)]
    require_tree(parents)
    if is_chain(parents):
        return drafts, None
    if seq.rules.acting_verifier == "coupled":
        return drafts, parents
    return chain_of(drafts, parents), None


def _continues(proposal: Proposal, seq: Sequence) -> bool:
    """Return whether the proposal was made for the present end; a stale one is never verified."""
    base = (proposal.base_length, proposal.base_token)
    return base == (seq.num_tokens, seq.token_ids[-1])
