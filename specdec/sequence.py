"""A request's tokens on their way through the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from specdec.detokenizer import IncrementalDetokenizer
from specdec.sampling_params import SamplingParams
from specdec.sampling_rules import SamplingRules
from specdec.stats import SpeculationStats
from specdec.step import SequenceAdmission


class SequenceStatus(Enum):
    """Where a sequence stands; a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Request:
    """What a caller hands to the engine. `seed` fixes every random choice of it.

    priority: a lower number goes first; among equals, whoever came first.
    resume_token_ids: output that the caller has already, from a service that was lost; generation
        goes on behind it, and what comes is what would have come.
    queue_deadline_s: when to give up a request that still waits, by the clock of `Engine.expire`.
    tenant: whose request it is; drafts never come from the text of another's.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    priority: int = 0
    resume_token_ids: tuple[int, ...] = ()
    queue_deadline_s: float = math.inf
    tenant: str = ""


@dataclass(eq=False)
class Sequence:
    """One choice of a request. KV exists for the first `num_computed_tokens` of `token_ids`.

    rules: how its tokens are drawn. max_tokens: most tokens to generate, None for no limit of its
    own. num_cached_tokens: those of its prompt whose KV was found in the prefix cache. has_run:
    whether it has been in a batch, as a preempted one has.
    """

    seq_id: int
    request: Request
    rules: SamplingRules
    detokenizer: IncrementalDetokenizer
    max_tokens: int | None = None
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    has_run: bool = False
    status: SequenceStatus = SequenceStatus.WAITING
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.resume_token_ids]

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first, in queue, batch and need of blocks: the lower one."""
        return self.request.priority, self.seq_id

    @property
    def admission(self) -> SequenceAdmission:
        """What a worker has to know of it."""
        return SequenceAdmission(
            seq_id=self.seq_id,
            num_prompt_tokens=self.num_prompt_tokens,
            rules=self.rules,
            token_ids=tuple(self.token_ids) if self.rules.needs_tokens else (),
        )

    @property
    def is_decoding(self) -> bool:
        """Only the last token is uncomputed. So is that of a prompt with one token left to go."""
        return self.num_uncomputed_tokens == 1
