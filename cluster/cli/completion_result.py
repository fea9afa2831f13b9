"""Streamed completions with their timing, as JSON data and as lines of text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from cluster.cli.tables import aligned
from specdec.types.responses import Choice, PositionLogprobs, StreamChunk, TokenLogprob, Usage


@dataclass(frozen=True)
class CompletionResult:
    """A completion with its time to first token and total time, in seconds since the request."""

    chunks: tuple[StreamChunk, ...]
    first_token_s: float
    total_s: float

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """The joined chunks of each choice."""
        by_index: dict[int, list[StreamChunk]] = {}
        for chunk in self.chunks:
            by_index.setdefault(chunk.choice, []).append(chunk)
        return tuple(_joined(by_index[index]) for index in sorted(by_index))

    @property
    def prompt_logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        """Log probabilities of the prompt's tokens from the second on; None if not requested."""
        return self.chunks[0].prompt_logprobs

    @property
    def content(self) -> dict[str, Any]:
        """The choices and the prompt's log probabilities, as JSON data."""
        content: dict[str, Any] = {"choices": [_choice_as_json(each) for each in self.choices]}
        if self.prompt_logprobs is not None:
            content["prompt_logprobs"] = [asdict(each) for each in self.prompt_logprobs]
        return content

    @property
    def usage(self) -> Usage:
        """Token usage of the request."""
        usage = self.chunks[-1].usage
        assert usage is not None, "the last chunk of a stream carries the usage"
        return usage

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the total time, including the time to first token."""
        return self.usage.completion_tokens / self.total_s

    @property
    def outcome(self) -> dict[str, Any]:
        """Everything but the content, as JSON data."""
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
        """One line of text."""
        return (
            f"{self.usage.completion_tokens} tokens, first after {self.first_token_s:.2f} s, "
            f"{self.tokens_per_s:.1f} tokens/s, {self._drafts}"
        )

    @property
    def _drafts(self) -> str:
        speculation = self.usage.speculation
        if not speculation.num_drafts:
            return "no drafts"
        lossy = "" if self.usage.is_lossless else f", lossy verifier {self.usage.verifier}"
        return (
            f"acceptance rate {speculation.acceptance_rate:.0%}, "
            f"acceptance length {speculation.mean_acceptance_length:.2f}{lossy}"
        )


def receive(
    chunks: Iterator[StreamChunk],
    show: Callable[[StreamChunk], None],
    clock: Callable[[], float] = time.perf_counter,
) -> CompletionResult:
    """Pass each chunk to `show`, and return all chunks with their timing."""
    sent_at, first_at = clock(), None
    received = []
    for chunk in chunks:
        if first_at is None and chunk.token_ids:
            first_at = clock()
        received.append(chunk)
        show(chunk)
    done_at = clock()
    return CompletionResult(tuple(received), (first_at or done_at) - sent_at, done_at - sent_at)


def chunk_as_json(chunk: StreamChunk) -> dict[str, Any]:
    """Return the fields of a chunk that are set, as JSON data."""
    reason = chunk.finish_reason
    fields: dict[str, Any] = {
        "choice": chunk.choice,
        "text": chunk.text,
        "token_ids": chunk.token_ids,
        "finish_reason": None if reason is None else reason.value,
        "stop_reason": chunk.stop_reason,
    }
    for name in ("logprobs", "prompt_logprobs"):
        logprobs = getattr(chunk, name)
        fields[name] = None if logprobs is None else [asdict(each) for each in logprobs]
    return {name: value for name, value in fields.items() if value is not None}


def _joined(chunks: Sequence[StreamChunk]) -> Choice:
    last = chunks[-1]
    assert last.finish_reason is not None, "the last chunk of a choice has a finish reason"
    logprobs = tuple(chain.from_iterable(chunk.logprobs or () for chunk in chunks))
    return Choice(
        index=last.choice,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=None if last.logprobs is None else logprobs,
    )


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    fields = asdict(choice) | {"finish_reason": choice.finish_reason.value}
    left_out = {"is_drafted", "text_lengths"} | ({"logprobs"} if choice.logprobs is None else set())
    return {name: value for name, value in fields.items() if name not in left_out}


def result_lines(result: CompletionResult, *, with_text: bool) -> Iterator[str]:
    """Yield the lines of a result: texts, with headings if there are several, and logprobs.

    with_text: False if the text was streamed already.
    """
    for choice in result.choices:
        if len(result.choices) > 1:
            yield _heading(choice)
        if with_text:
            yield choice.text
        if choice.logprobs is not None:
            yield from _table("output", choice.logprobs)
    if result.prompt_logprobs is not None:
        yield from _table("prompt", result.prompt_logprobs)


def _heading(choice: Choice) -> str:
    at = "" if choice.stop_reason is None else f" at {_quoted(choice.stop_reason)}"
    return f"--- choice {choice.index}, {choice.finish_reason.value}{at}"


def _table(name: str, positions: Sequence[PositionLogprobs]) -> list[str]:
    """Return a line per token: its log probability, rank, the most likely and the given ones."""
    rows = [(f"{name} token", "logprob", "rank", "best")]
    for position in positions:
        chosen, listed = position.chosen, (*position.best, *position.given)
        best = "  ".join(f"{_quoted(each.token)} {_number(each)}" for each in listed)
        rows.append((_quoted(chosen.token), _number(chosen), str(position.rank), best))
    return aligned(rows, numbers=(1, 2))


def _quoted(text: str | int) -> str:
    return json.dumps(text, ensure_ascii=False)


def _number(token: TokenLogprob) -> str:
    return f"{token.logprob:.3f}"
