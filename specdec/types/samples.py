"""Answers that a service keeps for the training of its draft head."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types.validation import check_types, require_range

MAX_TAKEN_TOKENS = 131_072
"""Most tokens in one response, which has to fit into a message."""


@dataclass(frozen=True)
class ServedSample:
    """An answer as it was served, to a request that allowed training.

    token_ids: of the prompt, with the chat template applied, and of the answer.
    num_prompt_tokens: those that the client supplied, a resumed part of the answer included; the
    rest is the target's own. temperature: at which it was drawn.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    temperature: float


@dataclass(frozen=True)
class SampleOrder:
    """Request for samples, which the replicas then forget. Raises InvalidValueError.

    max_tokens: of each replica. replica_id: empty for all replicas.
    """

    max_tokens: int = MAX_TAKEN_TOKENS
    replica_id: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        require_range("max_tokens", self.max_tokens, 1, MAX_TAKEN_TOKENS)


@dataclass(frozen=True)
class SampleBatch:
    """Samples of one replica, oldest first.

    num_left_tokens: that it still has. num_dropped: samples that were too old for its buffer since
    it started.
    """

    replica_id: str
    samples: tuple[ServedSample, ...] = ()
    num_left_tokens: int = 0
    num_dropped: int = 0
