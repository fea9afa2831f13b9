"""Rates that an engine expects at each load, by its own measurements."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from specdec.types.errors import InvalidValueError

LEAST_RATE, MOST_RATE = 1e-3, 1e9
MOST_STREAMS = 2**20


@dataclass(frozen=True)
class ServiceCurve:
    """Expected rates of an engine under its speculation settings in force.

    num_streams: numbers of running streams that decode, ascending, from 1 to the largest batch.
    stream_tokens_per_s: output tokens per second of each of them, while no prompt is computed.
    prompt_tokens_per_s: of steps that compute prompts, cached tokens aside, with one stream beside.
    """

    num_streams: tuple[int, ...]
    stream_tokens_per_s: tuple[float, ...]
    prompt_tokens_per_s: float

    def __post_init__(self) -> None:
        """Raise InvalidValueError for what is no curve: reports come from other processes."""
        sizes, rates = self.num_streams, self.stream_tokens_per_s
        is_ascending = bool(sizes) and sizes[0] == 1 and list(sizes) == sorted(set(sizes))
        if not is_ascending or sizes[-1] > MOST_STREAMS:
            raise InvalidValueError("num_streams", sizes, f"ascending from 1 to {MOST_STREAMS}")
        limit = f"from {LEAST_RATE:g} to {MOST_RATE:g}"
        if len(rates) != len(sizes) or not all(map(_is_rate, rates)):
            raise InvalidValueError("stream_tokens_per_s", rates, f"{limit} for each number")
        if not _is_rate(self.prompt_tokens_per_s):
            raise InvalidValueError("prompt_tokens_per_s", self.prompt_tokens_per_s, limit)

    @property
    def max_streams(self) -> int:
        """The largest batch; further streams wait."""
        return self.num_streams[-1]

    def token_s(self, num_streams: float) -> float:
        """Return the seconds of a stream's token where `num_streams` run; fewer than 1 count as 1.

        The seconds are linear between the numbers, as those of a step. Beyond the largest batch,
        streams take turns: they are proportional to their number.
        """
        sizes, rates, num_streams = self.num_streams, self.stream_tokens_per_s, max(1, num_streams)
        if num_streams >= sizes[-1]:
            return num_streams / sizes[-1] / rates[-1]
        high = max(1, bisect_left(sizes, num_streams))
        low_s, high_s = 1 / rates[high - 1], 1 / rates[high]
        share = (num_streams - sizes[high - 1]) / (sizes[high] - sizes[high - 1])
        return low_s + share * (high_s - low_s)

    def batch_tokens_per_s(self, num_streams: float) -> float:
        """Return the tokens per second of all of `num_streams` streams; see `token_s`."""
        return num_streams / self.token_s(num_streams)


def _is_rate(value: float) -> bool:
    return LEAST_RATE <= value <= MOST_RATE
