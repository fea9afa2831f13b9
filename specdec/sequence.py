"""A request's tokens on their way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from specdec.detokenizer import IncrementalDetokenizer
from specdec.sampling_params import SamplingParams
from specdec.stats import SpeculationStats


class SequenceStatus(Enum):
    """Where a sequence stands; a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context length


@dataclass(frozen=True)
class Request:
    """What a caller hands to the engine. `seed` fixes every random choice of it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(eq=False)
class Sequence:
    """One choice of a request. KV exists for the first `num_computed_tokens` of `token_ids`."""

    seq_id: int
    request: Request
    detokenizer: IncrementalDetokenizer
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

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
    def is_decoding(self) -> bool:
        """Only the last token is uncomputed. So is that of a prompt with one token left to go."""
        return self.num_uncomputed_tokens == 1
