"""A streamed completion, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from specdec.types.responses import Choice, PositionLogprobs, StreamChunk, Usage


@dataclass(frozen=True)
class Answer:
    """A completion with the time it took, in seconds since it was asked for."""

    chunks: tuple[StreamChunk, ...]
    first_token_s: float
    total_s: float

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """What was said, by choice."""
        by_index: dict[int, list[StreamChunk]] = {}
        for chunk in self.chunks:
            by_index.setdefault(chunk.choice, []).append(chunk)
        return tuple(_joined(by_index[index]) for index in sorted(by_index))

    @property
    def prompt_logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        """Of the prompt's tokens from the second on; None where they were not asked for."""
        return self.chunks[0].prompt_logprobs

    @property
    def content(self) -> dict[str, Any]:
        """What was said, as JSON takes it."""
        content: dict[str, Any] = {"choices": [_choice_as_json(each) for each in self.choices]}
        if self.prompt_logprobs is not None:
            content["prompt_logprobs"] = [asdict(each) for each in self.prompt_logprobs]
        return content

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
        """All but what was said, as JSON takes it."""
        last = self.chunks[-1]
        return {
            "request_id": last.request_id,
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
        lossy = "" if self.usage.is_lossless else f", lossy verifier {self.usage.verifier}"
        return (
            f"{self.usage.completion_tokens} tokens, first after {self.first_token_s:.2f} s, "
            f"{self.tokens_per_s:.1f} tokens/s, "
            f"acceptance rate {speculation.acceptance_rate:.0%}, "
            f"mean acceptance length {speculation.mean_acceptance_length:.2f}{lossy}"
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


def chunk_as_json(chunk: StreamChunk) -> dict[str, Any]:
    """What one chunk says, as JSON takes it; what it leaves unsaid is left out."""
    reason = chunk.finish_reason
    said: dict[str, Any] = {
        "choice": chunk.choice,
        "text": chunk.text,
        "token_ids": chunk.token_ids,
        "finish_reason": None if reason is None else reason.value,
        "stop_reason": chunk.stop_reason,
    }
    for name in ("logprobs", "prompt_logprobs"):
        logprobs = getattr(chunk, name)
        said[name] = None if logprobs is None else [asdict(each) for each in logprobs]
    return {name: value for name, value in said.items() if value is not None}


def _joined(chunks: Sequence[StreamChunk]) -> Choice:
    last = chunks[-1]
    assert last.finish_reason is not None, "the last chunk of a choice says why it ended"
    has_logprobs = last.logprobs is not None
    return Choice(
        index=last.choice,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(chain.from_iterable(chunk.logprobs or () for chunk in chunks))
        if has_logprobs
        else None,
    )


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    said = asdict(choice) | {"finish_reason": choice.finish_reason.value}
    return {name: value for name, value in said.items() if name != "logprobs" or value is not None}
