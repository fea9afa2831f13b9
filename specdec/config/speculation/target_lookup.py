"""The choice to look n-grams up on the target's ranks, where a GPU runs the steps.

A lookup in the engine's process needs the verified tokens there, so the GPU waits between two
steps. The ranks have the tokens on the device, and hold the drafts for a step begun ahead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.methods import NgramConfig
from specdec.config.speculation.speculative import SpeculativeConfig


@dataclass(frozen=True)
class TargetNgramConfig(NgramConfig):
    """Prompt lookup by the target's ranks at the end of each step, in the tokens on the device.

    Beside a head it drafts where the text has occurred before, and the head elsewhere.
    """

    proposer = "specdec.speculation.proposers.target_head:TargetHeadProposer"
    place = DraftPlace.TARGET
    drafts_trees = False
    reads_tokens = True


def with_lookup_on_ranks(speculation: SpeculativeConfig) -> SpeculativeConfig:
    """Return the configuration whose n-grams the target's ranks look up, if they can.

    They draft chains, alone or before a head, and hold them only where their number is known. The
    engine's lookup remains where the host verifies every row in any case.
    """
    lookup, *others = speculation.drafters
    is_first = type(lookup) is NgramConfig and others == [*filter(None, [speculation.head])]
    has_shapes = speculation.num_draft_tree_tokens > 0 or speculation.batch_budget
    if not is_first or has_shapes or speculation.verifier not in ("coupled", "synthetic"):
        return speculation
    return speculation.replacing(lookup, TargetNgramConfig(**asdict(lookup)))
