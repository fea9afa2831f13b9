"""Proposer of a configuration: one method, or a cascade with lookups before and behind a model.

A lookup costs microseconds and is right where a text repeats; a draft model costs a forward pass a
token and is right more evenly. Both cost the target one pass, so a short draft of a lookup does not
pay where the model would make a long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from specdec.config.methods import DraftPlace, MethodConfig
from specdec.config.speculative import SpeculativeConfig
from specdec.speculation.proposers.base import (
    DraftRequest,
    Proposal,
    Proposer,
    ProposerMemory,
)


@dataclass(frozen=True)
class Stage:
    """A proposer in a cascade.

    method: the name by which a request chooses this proposer.
    waits: whether its drafts are made elsewhere, so that `begin` and `collect` are separate.
    replaces_shorter: whether its drafts replace shorter ones of the stages before it; other stages
        only draft for sequences without any draft.
    """

    method: str
    proposer: Proposer
    waits: bool = False
    replaces_shorter: bool = False


class CascadeProposer:
    """Runs proposers in order; each drafts for the sequences that the ones before it left over.

    A stage that waits receives every sequence in every step, with max_tokens 0 where a draft of
    full length exists. Thus a draft model runs new text in chunks while the target works, and is at
    most MAX_PENDING_TOKENS behind when it is needed. A request that names a method is passed to
    that stage alone.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        """At most one of the stages may wait: the ones behind it draft in `collect`."""
        assert sum(stage.waits for stage in stages) <= 1, "more than one stage waits"
        self._stages = tuple(stages)
        self._requests: Sequence[DraftRequest] = ()
        self._drafted: dict[int, Proposal] = {}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Run the stages up to the one that waits, and begin that one."""
        self._requests, self._drafted = requests, {}
        for stage in self._stages:
            stage.proposer.begin(self._left_for(stage))
            if stage.waits:
                return
            self._keep(stage)

    def collect(self) -> list[Proposal]:
        """Return the drafts that are not empty, one a sequence, each with its method."""
        places = [index for index, stage in enumerate(self._stages) if stage.waits]
        for index in range(places[0], len(self._stages)) if places else ():
            stage = self._stages[index]
            if not stage.waits:
                stage.proposer.begin(self._left_for(stage))
            self._keep(stage)
        return list(self._drafted.values())

    def release(self, seq_id: int) -> None:
        """Release a sequence in every stage."""
        for stage in self._stages:
            stage.proposer.release(seq_id)

    def _left_for(self, stage: Stage) -> list[DraftRequest]:
        """Return the requests for a stage, with max_tokens 0 where nothing is left to draft."""
        left = []
        for request in self._requests:
            if request.method in (None, stage.method):
                num_wanted = request.max_tokens if stage.replaces_shorter else 1
                is_served = self._num_drafted(request) >= num_wanted
                left.append(replace(request, max_tokens=0) if is_served else request)
        return left

    def _num_drafted(self, request: DraftRequest) -> int:
        drafted = self._drafted.get(request.seq.seq_id)
        return 0 if drafted is None else len(drafted.draft_token_ids)

    def _keep(self, stage: Stage) -> None:
        proposals: Iterable[Proposal] = stage.proposer.collect()
        for each in proposals:
            before = self._drafted.get(each.seq_id)
            num_before = 0 if before is None else len(before.draft_token_ids)
            if len(each.draft_token_ids) >= max(1, num_before):
                self._drafted[each.seq_id] = replace(each, method=stage.method)


def make_proposer(
    config: SpeculativeConfig | None, draft_model: Proposer | None = None
) -> Proposer | None:
    """Return the proposer of a configuration; None if nothing drafts.

    draft_model: the proposer of the method that drafts on a worker, where one is configured.
    """
    if config is None:
        return None
    stages = [_make_stage(each, draft_model) for each in config.drafters]
    return stages[0].proposer if len(stages) == 1 else CascadeProposer(stages)


def _make_stage(config: MethodConfig, of_worker: Proposer | None) -> Stage:
    waits = config.place is DraftPlace.DRAFT_WORKER
    proposer = of_worker if waits else config.proposer_class()(config)
    assert proposer is not None, f"method {config.name} needs the proposer of its worker"
    return Stage(config.name, proposer, waits, config.place is not DraftPlace.ENGINE)


def proposer_memory(config: SpeculativeConfig | None) -> ProposerMemory:
    """Return the memory of all proposers that `config` loads."""
    drafters = () if config is None else config.drafters
    return ProposerMemory.sum(each.proposer_class().memory(each) for each in drafters)
