"""Tokens of a choice that are held back, to be told together."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.types.messages import Logprobs


class ToldTokens(NamedTuple):
    """What is told of a choice at once.

    logprobs: of token_ids, where asked for. num_steps: how many steps brought them. is_drafted: of
    each of token_ids, whether it was drafted and accepted.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    num_steps: int = 0
    is_drafted: tuple[bool, ...] = ()


@dataclass(eq=False)
class UntoldTokens:
    """Collects what steps bring, until there are `interval` tokens.

    The first ones are due at once, since a reader waits for them; the last are taken by whoever
    knows that they are. The second ones go with the next message of another choice that has as
    many tokens as the same interval asks for: choices that get a token a step are then told
    together from there on, which costs less than one after another.
    """

    interval: int
    _num_told: int = 0
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[Logprobs] = field(default_factory=list)
    _num_steps: int = 0
    _is_drafted: list[bool] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], logprobs: Logprobs | None, num_accepted: int) -> None:
        """Takes in what one step brought.

        logprobs: of token_ids, where asked for. num_accepted: so many of token_ids, the first ones,
        were drafted.
        """
        self._token_ids.extend(token_ids)
        num_drafted = min(num_accepted, len(token_ids))
        self._is_drafted += [True] * num_drafted + [False] * (len(token_ids) - num_drafted)
        self._num_steps += 1
        if logprobs is not None:
            self._logprobs.append(logprobs)

    @property
    def is_due(self) -> bool:
        """Whether it is time to tell them, whatever others do."""
        return self._num_told == 0 or len(self._token_ids) >= self.interval

    def joins(self, told_intervals: Set[int]) -> bool:
        """Whether they go with others' that have as many tokens as these intervals ask for."""
        return self._num_told == 1 and self.interval in told_intervals

    def take(self) -> ToldTokens:
        """Everything that was held back; nothing is, from now on."""
        logprobs = Logprobs.join(self._logprobs) if self._logprobs else None
        token_ids, is_drafted = tuple(self._token_ids), tuple(self._is_drafted)
        told = ToldTokens(token_ids, logprobs, self._num_steps, is_drafted)
        self._num_told += 1
        self._token_ids.clear()
        self._is_drafted.clear()
        self._logprobs.clear()
        self._num_steps = 0
        return told
