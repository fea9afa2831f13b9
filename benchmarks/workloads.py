"""What the benchmarks that generate have in common: a workload, how it went, and who runs it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NO_METHOD = "none"
"""The method of a workload without speculation."""


@dataclass(frozen=True)
class Workload:
    """One prompt for each stream, continued greedily by exactly `max_tokens` tokens.

    method: how to draft, a name that the contender knows.
    num_streams: so many are open at once, and the next begins where one ends; None opens all.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    method: str = NO_METHOD
    num_streams: int | None = None

    @property
    def num_open(self) -> int:
        """How many streams are open at once."""
        return min(self.num_streams or len(self.prompts), len(self.prompts))


@dataclass(frozen=True)
class StreamRecord:
    """What one stream brought, and when: seconds from its request to each of its messages."""

    token_ids: tuple[int, ...]
    arrivals_s: tuple[float, ...]

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds from each message to the next."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return tuple(later - earlier for earlier, later in pairs)


@dataclass(frozen=True)
class Measurement:
    """A workload's run, from its start to the last token of its last stream.

    streams: in the prompts' order.
    mean_acceptance_length: tokens a draft yielded, the target's own included; 1 without drafts,
        None where the contender does not tell.
    others_percent: what processes that take no part used meanwhile, in percent of one core.
    """

    seconds: float
    streams: tuple[StreamRecord, ...]
    mean_acceptance_length: float | None = 1.0
    others_percent: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.streams)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def first_token_s(self) -> float:
        """Until a stream's first token, the median of the streams."""
        return statistics.median(stream.arrivals_s[0] for stream in self.streams)


class Contender(Protocol):
    """Something that generates."""

    def measure(self, workload: Workload) -> Measurement:
        """Runs a workload once."""


def one_by_one(
    prompts: Sequence[tuple[int, ...]], max_tokens: int, method: str = NO_METHOD
) -> tuple[Workload, ...]:
    """A workload of one stream for each prompt."""
    return tuple(Workload((prompt,), max_tokens, method) for prompt in prompts)


def all_at_once(
    prompts: Sequence[tuple[int, ...]],
    num_streams: int,
    max_tokens: int,
    method: str = NO_METHOD,
) -> tuple[Workload, ...]:
    """One workload of `num_streams` streams, which repeats the prompts as needed."""
    repeated = tuple(prompts[index % len(prompts)] for index in range(num_streams))
    return (Workload(repeated, max_tokens, method),)
