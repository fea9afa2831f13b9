"""Several proposers for one batch: lookups before a draft model, or in its place where it has none.

A lookup costs microseconds and is right where a text repeats; a draft model costs a forward pass a
token and is right more evenly. Both cost the target one pass, so a short draft of a lookup does not
pay where the model would make a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.speculation.proposers.base import DraftRequest, Proposal, Proposer
from specdec.types.sampling_params import SpeculationMethod


@dataclass(frozen=True)
class Lookup:
    """A proposer that drafts at once, and the name by which a request asks for it."""

    method: SpeculationMethod
    proposer: Proposer


class CombinedProposer:
    """Asks a lookup, then the draft model, then another lookup about what is still without a draft.

    The first lookup spares the model a sequence if it drafts as many tokens as were asked for; a
    shorter draft of it counts where the model has none. The model hears of every sequence in every
    step, of a spared one with no tokens to draft: so it runs its text in chunks while the target
    works, and is at most MAX_PENDING_TOKENS behind when it is needed. A request that names a method
    is drafted for by that one alone, and the others do not hear of it.
    """

    def __init__(
        self, draft_model: Proposer, first: Lookup | None = None, fallback: Lookup | None = None
    ) -> None:
        """`fallback` is asked where the draft model is away, behind, or out of its context."""
        self._draft_model = draft_model
        self._first = first
        self._fallback = fallback
        self._requests: Sequence[DraftRequest] = ()
        self._drafted: dict[int, Proposal] = {}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Looks up what comes first, and has the draft model begin with the rest."""
        self._requests, self._drafted = requests, {}
        self._look_up(self._first)
        self._draft_model.begin(self._left_for("draft_model", until_full=True))

    def collect(self) -> list[Proposal]:
        """The drafts that are not empty, one a sequence, each with the method that made it."""
        self._keep("draft_model", self._draft_model.collect())
        self._look_up(self._fallback)
        return list(self._drafted.values())

    def release(self, seq_id: int) -> None:
        """Has every proposer forget a sequence."""
        self._draft_model.release(seq_id)
        for lookup in (self._first, self._fallback):
            if lookup is not None:
                lookup.proposer.release(seq_id)

    def _look_up(self, lookup: Lookup | None) -> None:
        if lookup is not None:
            lookup.proposer.begin(self._left_for(lookup.method, until_full=False))
            self._keep(lookup.method, lookup.proposer.collect())

    def _left_for(self, method: SpeculationMethod, *, until_full: bool) -> list[DraftRequest]:
        """Who may be drafted for by a method; who has a draft, or a full one, needs no tokens."""
        left = []
        for request in self._requests:
            if request.method in (None, method):
                num_wanted = request.max_tokens if until_full else 1
                is_served = self._num_drafted(request) >= num_wanted
                left.append(replace(request, max_tokens=0) if is_served else request)
        return left

    def _num_drafted(self, request: DraftRequest) -> int:
        drafted = self._drafted.get(request.seq.seq_id)
        return 0 if drafted is None else len(drafted.draft_token_ids)

    def _keep(self, method: SpeculationMethod, proposals: Sequence[Proposal]) -> None:
        drafts = (replace(each, method=method) for each in proposals if each.draft_token_ids)
        self._drafted |= {each.seq_id: each for each in drafts}
