"""What an engine does about drafts: who is asked for them, and who hears what came of them."""

from __future__ import annotations

import collections.abc

from specdec.config.speculative import SpeculativeConfig
from specdec.engine.scheduler import ScheduledRow
from specdec.sequences.sequence import Sequence
from specdec.speculation.policy.policy import SpeculationPolicy, StepDrafts
from specdec.speculation.proposers import DraftRequest, Proposal, Proposer
from specdec.types.draft_decision import Decision, DecisionReason, chain
from specdec.types.messages import StepRow
from specdec.types.stats import STRUCTURED_OUTPUT


class Drafting:
    """Stands between the engine and its proposer and policy.

    For each step, in this order: `decide`, `propose` where drafts are allowed, `begin_step`, and
    when its results are there `judge` for each row that was verified, then `end_step`.
    """

    def __init__(
        self,
        config: SpeculativeConfig | None,
        proposer: Proposer | None,
        policy: SpeculationPolicy | None,
    ) -> None:
        """config: None where nothing may be drafted. proposer: None where nothing drafts.

        policy: None drafts as configured at every load.
        """
        self.policy = policy
        self._config = config
        self._proposer = proposer
        self._length_rule = config.length_rule if config else None
        self._num_asked: dict[int, int] = {}  # draft tokens by sequence, of the last step
        self._drafters: dict[int, str] = {}  # methods by sequence, likewise

    @property
    def is_on(self) -> bool:
        """Whether a request that says nothing about it gets drafts."""
        return self.policy.is_on if self.policy else self._proposer is not None

    def decide(self, num_decoding: int, num_willing: int) -> Decision:
        """What a sequence may draft in the coming step; the two are as `SpeculationPolicy` says."""
        self._num_asked, self._drafters = {}, {}
        if self._proposer is None or self._config is None:
            return Decision(chain(0), DecisionReason.OPERATOR)
        if self.policy is None:
            return Decision(chain(self._config.num_speculative_tokens), DecisionReason.OPERATOR)
        return self.policy.decide(num_decoding, num_willing)

    def propose(self, rows: collections.abc.Sequence[ScheduledRow]) -> dict[int, Proposal]:
        """Drafts by sequence, for those of `rows` for which there are any."""
        if not rows or self._proposer is None:
            return {}
        requests = [
            DraftRequest(
                row.seq, row.num_draft_tokens, row.num_lookahead_tokens, self._method(row.seq)
            )
            for row in rows
        ]
        self._num_asked = {each.seq.seq_id: each.max_tokens for each in requests}
        self._proposer.begin(requests)
        proposals = {each.seq_id: each for each in self._proposer.collect()}
        self._drafters = {seq_id: self._drafter(each) for seq_id, each in proposals.items()}
        return proposals

    def begin_step(self, rows: collections.abc.Sequence[StepRow]) -> None:
        """Tells the policy of a step; one of prompts alone has nothing to do with drafts."""
        decoding = [row for row in rows if row.samples and row.num_known_tokens == 1]
        if self.policy is None or not decoding:
            return
        num_asked = sum(self._num_asked.get(row.seq_id, 0) > 0 for row in decoding)
        num_drafted = sum(row.num_draft_tokens > 0 for row in decoding)
        has_prefill = len(decoding) < len(rows)
        self.policy.begin_step(StepDrafts(num_asked, num_drafted, has_prefill))

    def drafter(self, seq_id: int) -> str:
        """What a row's draft is counted for: its method, even where a grammar has lengthened it."""
        return self._drafters.get(seq_id, STRUCTURED_OUTPUT)

    def judge(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learns from what came of a row's draft.

        The policy does not, where the request had chosen another method.
        """
        if self._length_rule is not None and seq.draft_length is not None:
            seq.draft_length = self._length_rule.after(seq.draft_length, num_drafted, num_accepted)
        if self.policy is not None and self._method(seq) == self.policy.control.method:
            num_asked = self._num_asked.get(seq.seq_id, 0)
            self.policy.observe_row(num_asked, num_drafted, num_accepted)

    def end_step(self) -> None:
        """The results of the step that was begun have all been judged."""
        if self.policy is not None:
            self.policy.end_step()

    def forget_step(self) -> None:
        """The step that was begun never ends."""
        if self.policy is not None:
            self.policy.forget_step()

    def release(self, seq_id: int) -> None:
        """Has the proposer drop a sequence that lost its blocks."""
        if self._proposer is not None:
            self._proposer.release(seq_id)

    def _method(self, seq: Sequence) -> str | None:
        """What is to draft for a sequence; None for all that is loaded, in its order."""
        control = self.policy.control if self.policy else None
        if control is None or control.allow_request_override:
            asked = seq.params.speculation.method
            if asked is not None:
                return asked
        return control.method if control else None

    def _drafter(self, proposal: Proposal) -> str:
        assert self._config is not None, "a proposal without speculation"
        if not proposal.draft_token_ids:
            return STRUCTURED_OUTPUT
        return proposal.method or self._config.method
