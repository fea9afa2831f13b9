"""The interface between the engine and the proposers."""

from __future__ import annotations

import collections.abc
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from specdec.sequences.sequence import Sequence
from specdec.types.drafts.draft_decision import DraftAhead
from specdec.types.drafts.draft_tree import depths
from specdec.types.messages import DraftProbs
from specdec.types.reports.additive import Additive
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

_ALWAYS_GRANTED = MAX_NUM_SPECULATIVE_TOKENS + 1
"""Most tokens that a step adds to a sequence: a sequence that is up to date stays so."""


class IngestBudget:
    """Tokens left to ingest in one step, shared by the sequences with long new text.

    A sequence whose text is not ingested completely has no draft; the next step continues.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def grant(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` new tokens a sequence may ingest now."""
        granted = min(num_tokens, max(self._num_left, _ALWAYS_GRANTED))
        self._num_left = max(0, self._num_left - granted)
        return granted


class DraftRequest(NamedTuple):
    """A sequence to draft for.

    max_tokens: most tokens to draft that follow each other; 0 if drafts are not wanted yet, but
        soon.
    max_lookahead_tokens: most guesses to run after the drafts. What follows them is in
        `seq.lookahead` after the step.
    method: the one method that is to draft, where several are loaded; None for all of them.
    max_nodes: most tokens of a tree of that depth, for proposers that draft trees; a chain is
        wanted unless they are more than max_tokens.
    may_wait: whether the step may wait for a draft that is not there yet.
    pending_drafts: those that are in flight after the sequence's text, for drafts ahead.
    """

    seq: Sequence
    max_tokens: int
    max_lookahead_tokens: int = 0
    method: str | None = None
    max_nodes: int = 0
    may_wait: bool = True
    pending_drafts: tuple[int, ...] = ()

    @property
    def wants_tree(self) -> bool:
        """Return whether the draft may be a tree."""
        return self.max_nodes > self.max_tokens > 0


class AheadWork(NamedTuple):
    """Passes of a draft model for one step. began_at_s: when they were ordered, by its clock."""

    began_at_s: float
    seconds: float


class Proposal(NamedTuple):
    """Draft tokens for one sequence; an empty draft is legal.

    base_length, base_token: the text that the draft continues: its number of tokens, and the last
        of them. The engine discards a proposal whose base is not the sequence's present end.
    draft_probs: the distributions that the tokens were drawn from, where the sequence's verifier
        needs them; None where each token was the only possible one.
    lookahead_token_ids: guesses to run after the drafts, to see what the target puts after them.
    method: the method that drafted, where several are loaded.
    parents: for a tree of drafts, the index of each draft token's parent, -1 for the base; None for
        a chain, in which each token follows the one before.
    work: of the draft model, where the draft was made while the target verified the one before.
    """

    seq_id: int
    base_length: int
    base_token: int
    draft_token_ids: tuple[int, ...]
    draft_probs: DraftProbs | None = None
    lookahead_token_ids: tuple[int, ...] = ()
    method: str | None = None
    parents: tuple[int, ...] | None = None
    work: AheadWork | None = None

    @property
    def is_ahead(self) -> bool:
        """Return whether it was made while the target verified the draft before."""
        return self.work is not None

    @property
    def depth(self) -> int:
        """Most draft tokens that can be accepted."""
        if self.parents is None:
            return len(self.draft_token_ids)
        return max(depths(self.parents), default=0)


@dataclass(frozen=True)
class ProposalAhead:
    """Drafts for one sequence after its pending drafts and its next token, which is not known yet.

    drafts_by_token: as in RowDrafting, for every token after which there is a draft.
    num_held_drafts, held_depth: as in RowDrafting, where the target's ranks have the draft.
    method: as in Proposal.
    """

    seq_id: int
    drafts_by_token: tuple[tuple[int, ...], ...] = ()
    num_held_drafts: int = 0
    held_depth: int = 0
    method: str | None = None


class SentRow(NamedTuple):
    """A row that the target runs, after which a proposer may draft meanwhile.

    base_length: tokens of the sequence before the drafts.
    draft_token_ids: the chain of drafts that the row verifies; of a tree its first path.
    num_next_tokens: most tokens to draft after the token that the target adds to them; 0 if none
        could become output.
    method: as in DraftRequest. ahead: what to draft. may_wait: whether the next step of these rows
        would wait for drafts.
    """

    seq: Sequence
    base_length: int
    draft_token_ids: tuple[int, ...]
    num_next_tokens: int
    method: str | None
    ahead: DraftAhead
    may_wait: bool = False


class Proposer(Protocol):
    """Drafts for a batch. With a lossless verifier it affects speed only, not the distribution.

    The engine calls in each step `take` before it sends the target the rows, `ahead` after, and
    `end_step` with the results.
    """

    def take(self, requests: collections.abc.Sequence[DraftRequest]) -> list[Proposal]:
        """Return drafts, in any order, perhaps not for all requests.

        Sequences hold verified tokens only. Waits for drafts of requests that may wait; for the
        others it returns what is there and continues their text.
        """

    def ahead(self, rows: collections.abc.Sequence[SentRow]) -> None:
        """Begin to draft after rows that the target runs; returns without waiting."""

    def end_step(self, *, is_lost: bool = False) -> None:
        """Take note that the target has run its oldest step, or has lost those in flight."""

    def release(self, seq_id: int) -> None:
        """Drop the state of a sequence; an unknown one is no error."""


@runtime_checkable
class AheadProposer(Protocol):
    """Proposer whose drafts may be known before the step in flight is done.

    guesses_outcomes: whether it drafts for likely outcomes alone; after others `take` might have
        found a draft.
    """

    @property
    def guesses_outcomes(self) -> bool: ...

    def propose_ahead(
        self, requests: collections.abc.Sequence[DraftRequest]
    ) -> list[ProposalAhead] | None:
        """Return what `take` would draft after each token that may come next, or after likely ones.

        Returns None where it cannot be known, or would take too long.
        """


class SynchronousProposer(ABC):
    """Base of proposers that draft synchronously, in microseconds."""

    guesses_outcomes = False

    def take(self, requests: collections.abc.Sequence[DraftRequest]) -> list[Proposal]:
        """Look the drafts up; see Proposer. Some may be empty."""
        return [self._propose(request) for request in requests]

    def ahead(self, rows: collections.abc.Sequence[SentRow]) -> None:
        """Do nothing: a lookup takes no longer than it would take to ask for it ahead."""
        del rows

    def end_step(self, *, is_lost: bool = False) -> None:
        """Do nothing: a lookup takes no time of the target's step."""
        del is_lost

    def propose_ahead(
        self, requests: collections.abc.Sequence[DraftRequest]
    ) -> list[ProposalAhead] | None:
        """See AheadProposer."""
        return None

    @abstractmethod
    def release(self, seq_id: int) -> None:
        """Drop the state of a sequence; an unknown one is no error."""

    @abstractmethod
    def _propose(self, request: DraftRequest) -> Proposal:
        """Return the draft for one sequence."""


@dataclass(frozen=True)
class ProposerMemory(Additive):
    """Most memory of a proposer in the engine's process, KV aside.

    fixed_bytes: independent of the load. bytes_per_sequence: for each running sequence.
    bytes_per_token: for each token, prompt and output, of the running sequences.
    """

    fixed_bytes: int = 0
    bytes_per_sequence: int = 0
    bytes_per_token: int = 0
