"""Workloads, measurements and contenders of the benchmarks that generate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MODEL = "smollm2-135m-instruct"
"""Model that the benchmarks run."""

NO_METHOD = "none"
"""Method of a workload without speculation."""


@dataclass(frozen=True)
class Workload:
    """One prompt per stream, continued by exactly `max_tokens` tokens.

    method: a drafting method known to the contender. temperature: above 0 all have the same seed.
    num_streams: number of open streams; a new one starts when one ends. None opens all at once.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    method: str = NO_METHOD
    num_streams: int | None = None
    temperature: float = 0.0

    @property
    def num_open(self) -> int:
        """Number of streams that are open at once."""
        return min(self.num_streams or len(self.prompts), len(self.prompts))


@dataclass(frozen=True)
class StreamRecord:
    """Tokens of one stream, and the seconds from its request to each of its messages."""

    token_ids: tuple[int, ...]
    arrivals_s: tuple[float, ...]

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds from each message to the next."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return tuple(later - earlier for earlier, later in pairs)


@dataclass(frozen=True)
class Measurement:
    """Result of a workload, from its start to the last token of its last stream.

    streams: in the prompts' order.
    mean_acceptance_length: tokens per draft, the target's own included; 1 without drafts, None if
        the contender does not report it.
    others_percent: CPU usage of other processes, in percent of one core.
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
        """Median over the streams of the seconds until the first token."""
        return statistics.median(stream.arrivals_s[0] for stream in self.streams)


class Contender(Protocol):
    """Implementation that can run a workload."""

    def measure(self, workload: Workload) -> Measurement:
        """Run a workload once."""


def one_by_one(
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    method: str = NO_METHOD,
    temperature: float = 0.0,
) -> tuple[Workload, ...]:
    """Return one workload of one stream per prompt."""
    return tuple(
        Workload((prompt,), max_tokens, method, temperature=temperature) for prompt in prompts
    )


def all_at_once(
    prompts: Sequence[tuple[int, ...]],
    num_streams: int,
    max_tokens: int,
    method: str = NO_METHOD,
) -> tuple[Workload, ...]:
    """Return one workload of `num_streams` streams, repeating the prompts as needed."""
    repeated = tuple(prompts[index % len(prompts)] for index in range(num_streams))
    return (Workload(repeated, max_tokens, method),)
