"""The drafts of one step, and what was asked of their proposer."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from specdec.sequences.sequence import HeadDraft
from specdec.speculation.proposers import AheadWork, Proposal, ProposalAhead
from specdec.types.messages import StepRow


@dataclass(frozen=True)
class Drafting:
    """The drafts of one step, each by sequence.

    ahead: in place of proposals, for a step whose tokens are pending. is_guessed: whether these are
        for likely outcomes alone.
    num_requested: the draft tokens that were wanted, of a tree its depth. num_left_out: those that
        were not, since they are not worth their rows; None where all are. trees: sequences for
        which a tree was wanted. methods: of the drafts that are not empty.
    has_waited, waited_s: whether the step has waited for a draft model, and for how long.
    work: of a draft model, for those of the drafts that were made ahead.
    """

    proposals: Mapping[int, Proposal] = field(default_factory=dict)
    ahead: Mapping[int, ProposalAhead] = field(default_factory=dict)
    num_requested: Mapping[int, int] = field(default_factory=dict)
    trees: frozenset[int] = frozenset()
    methods: Mapping[int, str] = field(default_factory=dict)
    has_waited: bool = False
    waited_s: float = 0.0
    work: frozenset[AheadWork] = frozenset()
    num_left_out: Mapping[int, int] | None = None
    is_guessed: bool = False

    def resolved(
        self,
        rows: collections.abc.Sequence[StepRow],
        find_drafts: Callable[[], Mapping[int, HeadDraft]],
    ) -> Drafting:
        """Return it with the number that each resolved row wanted of held drafts.

        find_drafts: returns those that were held, by sequence.
        """
        if not self.ahead:
            return self
        held = {
            row.seq_id: row.drafting.held_depth or row.drafting.num_held
            for row in rows
            if self._is_held(row.seq_id)
        }
        drafts = find_drafts().items()
        methods = {seq_id: each.method for seq_id, each in drafts if each.method}
        own = {seq_id: methods[seq_id] for seq_id in held if seq_id in methods}
        return replace(
            self,
            num_requested={**self.num_requested, **held},
            methods={**self.methods, **own},
        )

    def num_slots(self, rows: collections.abc.Sequence[StepRow]) -> int | None:
        """Return the draft tokens of `rows` that were wanted; None where none are left out."""
        if self.num_left_out is None:
            return None
        return sum(self.num_requested.get(row.seq_id, 0) for row in rows)

    def _is_held(self, seq_id: int) -> bool:
        return seq_id in self.ahead and self.ahead[seq_id].num_held_drafts > 0


NO_DRAFTING = Drafting()
"""Drafting of a step without drafts."""
