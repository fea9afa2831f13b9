"""Base of the entries in the table of drafting methods."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

from specdec.types.validation import require_range


class DraftPlace(Enum):
    """The process that drafts.

    ENGINE: the process of the engine, within the call of the proposer, in microseconds.
    DRAFT_WORKER: a separate worker with a draft model, whose time adds to that of a step.
    TARGET: the target's ranks, which draft for the next step at the end of each.
    """

    ENGINE = "engine"
    DRAFT_WORKER = "draft_worker"
    TARGET = "target"


def within(default: Any, low: float, high: float) -> Any:
    """Return a field with a range that `MethodConfig` checks."""
    return field(default=default, metadata={"range": (low, high)})


class TrainedDrafter(NamedTuple):
    """The drafter that `specdec train` makes for a method.

    module: the class that learns, as "module:class" (`specdec.training.drafters`). has_layers:
    whether it has decoder layers, which are Llama's. sizes: fields of TrainingConfig that it reads
    and some other methods do not.
    """

    module: str
    has_layers: bool = False
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MethodConfig:
    """Base of the configurations of drafting methods; each field is a key of speculative_config.

    name: the method in configurations, requests, metrics and protos.
    proposer: the class of the proposer, as "module:class". Its static method `memory` returns the
        memory that a configuration needs. Unless a worker drafts, the configuration is the only
        argument of the class.
    place: the process that drafts.
    other_names: in vLLM, and in capitals that of SGLang's algorithm.
    parallel_of: the method that this one is with `parallel_drafting`; None for a separate method.
    is_in_target: whether the target's own checkpoint may contain what drafts.
    writes_kv, reads_tokens: of what drafts on the target's ranks, whether it has attention, so that
        its drafts need KV slots, and whether it needs the tokens of every sequence.
    trained: what `specdec train` makes; None where it makes nothing.
    """

    name: ClassVar[str]
    proposer: ClassVar[str]
    place: ClassVar[DraftPlace] = DraftPlace.ENGINE
    drafts_trees: ClassVar[bool] = False
    other_names: ClassVar[tuple[str, ...]] = ()
    parallel_of: ClassVar[str | None] = None
    is_in_target: ClassVar[bool] = False
    writes_kv: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    trained: ClassVar[TrainedDrafter | None] = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if "range" in each.metadata:
                key, bounds = f"speculative_config.{each.name}", each.metadata["range"]
                require_range(key, getattr(self, each.name), *bounds)

    @classmethod
    def proposer_class(cls) -> Any:
        """Import the class of the proposer."""
        return resolve_name(cls.proposer)

    @property
    def num_lookahead_tokens(self) -> int:
        """Guesses that the target runs in each step after a sequence's drafts."""
        return 0
