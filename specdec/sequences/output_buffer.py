"""Buffers output tokens until `stream_interval` of them can be sent."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.types.messages import Logprobs


class BufferedTokens(NamedTuple):
    """Output tokens of a choice that are sent together.

    logprobs: of token_ids, where requested. num_steps: the steps that produced them. is_drafted:
    for each of token_ids, whether it is an accepted draft token.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    num_steps: int = 0
    is_drafted: tuple[bool, ...] = ()


@dataclass(eq=False)
class OutputBuffer:
    """Collects the tokens of a choice until there are `interval` of them.

    The first message is due at once, for a short time to first token; the caller takes the last one
    when the choice ends. The second message is sent early, with a message of another choice that
    has filled the same interval. So choices that get one token per step send in the same steps from
    then on, which costs less than sending one after another.
    """

    interval: int
    _num_sent: int = 0
    _num_tokens: int = 0
    _parts: list[BufferedTokens] = field(default_factory=list)  # of one step each

    def add(self, token_ids: tuple[int, ...], logprobs: Logprobs | None, num_accepted: int) -> None:
        """Add the tokens of one step.

        logprobs: of token_ids, where requested. num_accepted: the number of leading token_ids that
        were drafted.
        """
        num_drafted = min(num_accepted, len(token_ids))
        is_drafted = (True,) * num_drafted + (False,) * (len(token_ids) - num_drafted)
        self._parts.append(BufferedTokens(token_ids, logprobs, 1, is_drafted))
        self._num_tokens += len(token_ids)

    @property
    def is_due(self) -> bool:
        """Return whether the tokens are to be sent, whatever other choices do."""
        return self._num_sent == 0 or self._num_tokens >= self.interval

    def joins(self, full_intervals: Set[int]) -> bool:
        """Return whether the tokens are sent along with choices that filled these intervals."""
        return self._num_sent == 1 and self.interval in full_intervals

    def take(self) -> BufferedTokens:
        """Return all tokens and empty the buffer."""
        parts, self._parts, self._num_tokens = self._parts, [], 0
        self._num_sent += 1
        return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: Sequence[BufferedTokens]) -> BufferedTokens:
    """Return the tokens of several steps together."""
    logprobs = [each.logprobs for each in parts if each.logprobs is not None]
    return BufferedTokens(
        tuple(token for each in parts for token in each.token_ids),
        Logprobs.join(logprobs) if logprobs else None,
        sum(each.num_steps for each in parts),
        tuple(is_drafted for each in parts for is_drafted in each.is_drafted),
    )
