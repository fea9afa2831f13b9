"""A streamed completion, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from specdec.client import StreamChunk, Usage


@dataclass(frozen=True)
class Answer:
    """A completion with the time it took, in seconds since it was asked for."""

    chunks: tuple[StreamChunk, ...]
    first_token_s: float
    total_s: float

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def content(self) -> dict[str, Any]:
        """The text and its tokens, as JSON takes them."""
        token_ids = [token_id for chunk in self.chunks for token_id in chunk.token_ids]
        return {"text": self.text, "token_ids": token_ids}

    @property
    def usage(self) -> Usage:
        """What the request took."""
        usage = self.chunks[-1].usage
        assert usage is not None, "the last chunk of a stream carries the usage"
        return usage

    @property
    def tokens_per_s(self) -> float:
        """Over the whole time, the wait for the first token included."""
        return self.usage.completion_tokens / self.total_s

    @property
    def outcome(self) -> dict[str, Any]:
        """All but the text and its tokens, as JSON takes it."""
        last = self.chunks[-1]
        assert last.finish_reason is not None, "the last chunk of a stream says why it ended"
        return {
            "request_id": last.request_id,
            "finish_reason": last.finish_reason.value,
            "seed": last.seed,
            "usage": asdict(self.usage),
            "time_to_first_token_s": self.first_token_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "acceptance_rate": self.usage.speculation.acceptance_rate,
            "mean_acceptance_length": self.usage.speculation.mean_acceptance_length,
        }

    @property
    def summary(self) -> str:
        """One line for a reader."""
        speculation = self.usage.speculation
        return (
            f"{self.usage.completion_tokens} tokens, first after {self.first_token_s:.2f} s, "
            f"{self.tokens_per_s:.1f} tokens/s, "
            f"acceptance rate {speculation.acceptance_rate:.0%}, "
            f"mean acceptance length {speculation.mean_acceptance_length:.2f}"
        )


def receive(
    chunks: Iterator[StreamChunk],
    show: Callable[[StreamChunk], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Shows chunks as they come, and returns all of them with their timing."""
    asked_at, first_at = clock(), None
    received = []
    for chunk in chunks:
        if first_at is None and chunk.token_ids:
            first_at = clock()
        received.append(chunk)
        show(chunk)
    done_at = clock()
    return Answer(tuple(received), (first_at or done_at) - asked_at, done_at - asked_at)
