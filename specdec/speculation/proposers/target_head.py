"""Proposer of the drafts that the target's ranks made at the end of the last step.

The ranks draft after the tokens that they have just verified, with a head or by lookups, and return
drafts and tokens together (`specdec.worker.head`). Here a draft waits for its step. A step ahead
takes it on the ranks instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.config.speculation.method_config import MethodConfig
from specdec.speculation.proposers.base import (
    DraftRequest,
    Proposal,
    ProposalAhead,
    ProposerMemory,
    SynchronousProposer,
)
from specdec.types.drafts.draft_tree import wanted_part


class TargetHeadProposer(SynchronousProposer):
    """Proposer that passes on the drafts of the target's ranks, without any state."""

    def __init__(self, config: MethodConfig) -> None:
        del config

    @staticmethod
    def memory(config: MethodConfig) -> ProposerMemory:
        """Return the memory in the engine's process: a few integers a sequence."""
        del config
        return ProposerMemory()

    def release(self, seq_id: int) -> None:
        """Do nothing: the drafts are kept by the sequences."""

    def propose_ahead(self, requests: Sequence[DraftRequest]) -> list[ProposalAhead]:
        """Have the ranks take what they will have drafted after the tokens in flight."""
        return [
            ProposalAhead(
                each.seq.seq_id,
                num_held_drafts=each.max_nodes if each.wants_tree else each.max_tokens,
                held_depth=each.max_tokens if each.wants_tree else 0,
            )
            for each in requests
        ]

    def _propose(self, request: DraftRequest) -> Proposal:
        """Return the draft as far as it is wanted now; the number was another when it was made."""
        seq, draft = request.seq, request.seq.head_draft
        is_other = draft and draft.method and request.method not in (None, draft.method)
        if draft is None or is_other:
            return Proposal(seq.seq_id, seq.num_tokens, seq.token_ids[-1], ())
        wanted = (request.max_nodes, request.max_tokens)
        drafts, parents = wanted_part(draft.token_ids, draft.parents, *wanted)
        base = draft.base_length, draft.base_token
        return Proposal(seq.seq_id, *base, drafts, method=draft.method, parents=parents)
