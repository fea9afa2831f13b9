"""Buffers output tokens until `stream_interval` of them can be sent."""

from __future__ import annotations

from collections.abc import Set
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


_NOT_DRAFTED = (False,)


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
    _num_steps: int = 0
    _token_ids: list[int] = field(default_factory=list)
    _is_drafted: list[bool] = field(default_factory=list)
    _logprobs: list[Logprobs] = field(default_factory=list)  # of one step each

    def add(self, token_ids: tuple[int, ...], logprobs: Logprobs | None, num_accepted: int) -> None:
        """Add the tokens of one step.

        logprobs: of token_ids, where requested. num_accepted: the number of leading token_ids that
        were drafted.
        """
        num_drafted = min(num_accepted, len(token_ids))
        self._num_steps += 1
        self._token_ids += token_ids
        self._is_drafted += (True,) * num_drafted + (False,) * (len(token_ids) - num_drafted)
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def pass_token(self, token_id: int, *, is_last: bool) -> BufferedTokens | None:
        """Add the only token of one step, which was not drafted; return all tokens if they are due.

        is_last: whether they are due in any case.
        """
        if not self._num_steps and (is_last or self.interval <= 1 or not self._num_sent):
            self._num_sent += 1
            return BufferedTokens((token_id,), None, 1, _NOT_DRAFTED)
        self._num_steps += 1
        self._token_ids.append(token_id)
        self._is_drafted.append(False)
        return self.take() if is_last or self.is_due else None

    @property
    def has_tokens(self) -> bool:
        """Return whether tokens wait."""
        return self._num_steps > 0

    @property
    def is_due(self) -> bool:
        """Return whether the tokens are to be sent, whatever other choices do."""
        return self._num_sent == 0 or len(self._token_ids) >= self.interval

    def joins(self, full_intervals: Set[int]) -> bool:
        """Return whether the tokens are sent along with choices that filled these intervals."""
        return self._num_sent == 1 and self.interval in full_intervals

    def take(self) -> BufferedTokens:
        """Return all tokens and empty the buffer."""
        logprobs = None
        if self._logprobs:
            parts, self._logprobs = self._logprobs, []
            logprobs = parts[0] if len(parts) == 1 else Logprobs.join(parts)
        token_ids, is_drafted = tuple(self._token_ids), tuple(self._is_drafted)
        taken = BufferedTokens(token_ids, logprobs, self._num_steps, is_drafted)
        self._num_sent += 1
        self._num_steps = 0
        self._token_ids.clear()
        self._is_drafted.clear()
        return taken
