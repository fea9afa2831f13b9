"""Proposer of a configuration: one method, or a cascade of several, in order.

A lookup costs microseconds and is right where a text repeats; a model costs a forward pass and is
right more evenly. Both cost the target one pass, so a short draft of a lookup does not pay where a
model would make a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.config.speculation.method_config import DraftPlace, MethodConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.proposers.base import (
    AheadProposer,
    DraftRequest,
    Proposal,
    ProposalAhead,
    Proposer,
    ProposerMemory,
    SentRow,
)
from specdec.speculation.proposers.corpus import Encode
from specdec.speculation.proposers.suffix import SuffixProposer
from specdec.speculation.proposers.target_head import TargetHeadProposer


@dataclass(frozen=True)
class Stage:
    """A proposer in a cascade.

    method: the name by which a request chooses this proposer.
    is_model: whether its drafts replace drafts of the lookups before it that are not longer, or,
        where its own have probabilities, of any length. Otherwise it drafts only for sequences
        without any draft.
    """

    method: str
    proposer: Proposer
    is_model: bool = False


class CascadeProposer:
    """Runs proposers in order; each drafts for the sequences that the ones before it left over.

    Every stage receives every sequence in every step, with max_tokens 0 where nothing is left to
    draft. Thus a draft model runs new text in chunks while the target works, and lacks at most
    MAX_PENDING_TOKENS when it is needed. A request that names a method is passed to that
    stage alone.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Order the stages as they draft."""
        self._stages = tuple(stages)
        self._proposals: dict[int, Proposal] = {}  # of the present step
        self._by_models: set[int] = set()  # sequences with a draft of a model
        first, *others = (stage.proposer for stage in self._stages)
        are_models = not any(isinstance(each, AheadProposer) for each in others)
        self._guesser: AheadProposer | None = None
        if are_models and isinstance(first, AheadProposer) and first.guesses_outcomes:
            self._guesser = first

    def take(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return one proposal a sequence that has drafts or guesses, each with its method."""
        self._proposals, self._by_models = {}, set()
        for stage in self._stages:
            self._keep(stage, stage.proposer.take(self._left_for(stage, requests)))
        return list(self._proposals.values())

    @property
    def guesses_outcomes(self) -> bool:
        """See AheadProposer: as its first stage does, where the others draft on a worker."""
        return self._guesser is not None

    def propose_ahead(self, requests: Sequence[DraftRequest]) -> list[ProposalAhead] | None:
        """Return the guesses of the first stage where no other would draft; these catch up.

        After the likeliest token of each sequence, that is: there its drafts have the whole length.
        """
        first, *others = self._stages
        if self._guesser is None:
            return None
        if any(each.max_tokens and each.method not in (None, first.method) for each in requests):
            return None
        found = self._guesser.propose_ahead(_for_stage(first, requests))
        if found is None:
            return None
        depths = {
            each.seq_id: len(each.drafts_by_token[0]) - 1 for each in found if each.drafts_by_token
        }
        if any(depths.get(each.seq.seq_id, 0) < each.max_tokens for each in requests):
            return None
        idle = [each._replace(max_tokens=0) for each in requests]
        for stage in others:
            stage.proposer.take(_for_stage(stage, idle))
        return [replace(each, method=first.method) for each in found]

    def ahead(self, rows: Sequence[SentRow]) -> None:
        """Pass the rows on to the stages that may draft for them, whichever made their drafts."""
        for stage in self._stages:
            stage.proposer.ahead([row for row in rows if row.method in (None, stage.method)])

    def end_step(self, *, is_lost: bool = False) -> None:
        """Pass it on to every stage."""
        for stage in self._stages:
            stage.proposer.end_step(is_lost=is_lost)

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        """The proposers of all stages."""
        return tuple(stage.proposer for stage in self._stages)

    def release(self, seq_id: int) -> None:
        """Release a sequence in every stage."""
        for stage in self._stages:
            stage.proposer.release(seq_id)

    def _left_for(self, stage: Stage, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Return the requests for a stage, with max_tokens 0 where nothing is left to draft."""
        return [
            request._replace(max_tokens=0) if self._is_served(request, stage) else request
            for request in _for_stage(stage, requests)
        ]

    def _is_served(self, request: DraftRequest, stage: Stage) -> bool:
        seq_id = request.seq.seq_id
        proposal = self._proposals.get(seq_id)
        num_drafted = 0 if proposal is None else proposal.depth
        may_replace = stage.is_model and seq_id not in self._by_models
        return num_drafted >= (request.max_tokens if may_replace else 1)

    def _keep(self, stage: Stage, proposals: Sequence[Proposal]) -> None:
        """Keep the drafts of a stage; guesses without a draft run only where nothing drafts.

        A head, which drafts for all, does not replace a longer draft. A draft with probabilities
        does: it may have ended because of the tokens that were sampled, and to verify only those
        drafts that became long would bias rejection sampling. Whether it has any token depends on
        the text alone.
        """
        for each in proposals:
            before = self._proposals.get(each.seq_id)
            depth_before = 0 if before is None else before.depth
            guesses_alone = each.lookahead_token_ids and before is None
            is_sampled = each.draft_probs is not None and each.draft_token_ids
            if is_sampled or each.depth >= max(1, depth_before) or guesses_alone:
                self._proposals[each.seq_id] = each._replace(method=stage.method)
            if each.draft_token_ids and stage.is_model:
                self._by_models.add(each.seq_id)


def make_proposer(
    config: SpeculativeConfig | None, draft_model: Proposer | None = None
) -> Proposer | None:
    """Return the proposer of a configuration; None if nothing drafts.

    draft_model: the proposer of the method that drafts on a worker, where one is configured.
    """
    if config is None:
        return None
    if config.rank_drafters == config.drafters:
        return TargetHeadProposer(config.drafter)
    stages = [_make_stage(each, draft_model) for each in config.drafters]
    return stages[0].proposer if len(stages) == 1 else CascadeProposer(stages)


def _for_stage(stage: Stage, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
    return [each for each in requests if each.method in (None, stage.method)]


def load_corpora(proposer: Proposer | None, encode: Encode) -> None:
    """Load the corpora that proposers look up, which takes seconds. Raises InvalidValueError.

    encode: returns the tokens of a text, without special tokens.
    """
    proposers = proposer.proposers if isinstance(proposer, CascadeProposer) else (proposer,)
    for each in proposers:
        if isinstance(each, SuffixProposer):
            each.load_corpus(encode)


def _make_stage(config: MethodConfig, of_worker: Proposer | None) -> Stage:
    is_on_worker = config.place is DraftPlace.DRAFT_WORKER
    proposer = of_worker if is_on_worker else config.proposer_class()(config)
    assert proposer is not None, f"method {config.name} needs the proposer of its worker"
    return Stage(config.name, proposer, config.place is not DraftPlace.ENGINE)


def proposer_memory(config: SpeculativeConfig | None) -> ProposerMemory:
    """Return the memory of all proposers that `config` loads."""
    drafters = () if config is None else config.drafters
    return ProposerMemory.sum(each.proposer_class().memory(each) for each in drafters)
