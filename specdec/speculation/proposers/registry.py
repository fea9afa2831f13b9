"""Registry of drafting methods: from a configuration to its proposer and the proposer's memory.

To add a method, write a configuration class (`specdec.config.methods`) and a module with a proposer
and its memory, and add an entry to `_ENTRIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.config.methods import (
    DraftModelConfig,
    DraftPlace,
    LookaheadConfig,
    MethodConfig,
    NgramConfig,
    SuffixConfig,
)
from specdec.config.speculative import SpeculativeConfig
from specdec.speculation.proposers import draft_model, lookahead, ngram, suffix
from specdec.speculation.proposers.base import Proposer, ProposerMemory
from specdec.speculation.proposers.cascade import CascadeProposer, Stage


@dataclass(frozen=True)
class _Entry:
    """One drafting method. Both functions take an instance of `config_class`.

    make: returns a proposer; None for a method that drafts on a worker, whose owner makes the
        proposer.
    memory: returns the memory of that proposer.
    """

    config_class: type[MethodConfig]
    make: Callable[[Any], Proposer] | None
    memory: Callable[[Any], ProposerMemory]


_ENTRIES = {
    entry.config_class.name: entry
    for entry in (
        _Entry(NgramConfig, ngram.NgramProposer, ngram.memory),
        _Entry(SuffixConfig, suffix.SuffixProposer, suffix.memory),
        _Entry(LookaheadConfig, lookahead.LookaheadProposer, lookahead.memory),
        _Entry(DraftModelConfig, None, draft_model.memory),
    )
}


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
    make = _ENTRIES[config.name].make
    proposer = of_worker if make is None else make(config)
    assert proposer is not None, f"method {config.name} needs the proposer of its worker"
    return Stage(config.name, proposer, waits=config.place is not DraftPlace.ENGINE)


def proposer_memory(config: SpeculativeConfig | None) -> ProposerMemory:
    """Return the memory of all proposers that `config` loads."""
    drafters = () if config is None else config.drafters
    return ProposerMemory.sum(_ENTRIES[each.name].memory(each) for each in drafters)
