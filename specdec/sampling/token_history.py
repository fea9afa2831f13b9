"""The tokens of one sequence, with the number of occurrences of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """The distinct tokens of prompt and output, in the order in which they first occur.

    num_of_prompt: how many of them are in the prompt.
    """

    token_ids: NDArray[np.int64]  # [num_distinct]
    num_in_output: NDArray[np.int64]  # [num_distinct], 0 for tokens of the prompt only
    num_of_prompt: int


class TokenHistory:
    """Tokens of a sequence for penalties and bad words: a fixed prompt, and output as a stack.

    Tokens are added and removed at the end only, with their counts, so that rejected drafts can be
    removed exactly.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """token_ids: the prompt and the output so far."""
        assert len(token_ids) >= num_prompt_tokens, "the whole prompt must be given"
        self.num_prompt_tokens = num_prompt_tokens
        self._token_ids = list(token_ids[:num_prompt_tokens])
        distinct = dict.fromkeys(self._token_ids)
        self._num_prompt_distinct = len(distinct)
        self._indices = {token: index for index, token in enumerate(distinct)}
        # Longer than needed, so that there is room to grow.
        self._distinct = np.array([*distinct, 0], dtype=np.int64)
        self._num_in_output = np.zeros(len(self._distinct), dtype=np.int64)
        self.extend(token_ids[num_prompt_tokens:])

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt and the output."""
        return self._token_ids

    def ends_with(self, token_ids: Sequence[int]) -> bool:
        """Return whether the output ends with these tokens."""
        start = len(self) - len(token_ids)
        return start >= self.num_prompt_tokens and self._token_ids[start:] == list(token_ids)

    def counts(self) -> TokenCounts:
        """Copy the current counts; the cost is linear in the number of distinct tokens."""
        num_distinct = len(self._indices)
        return TokenCounts(
            self._distinct[:num_distinct].copy(),
            self._num_in_output[:num_distinct].copy(),
            self._num_prompt_distinct,
        )

    def append(self, token: int) -> None:
        """Append an output token."""
        self._token_ids.append(token)
        index = self._indices.setdefault(token, len(self._indices))
        if index == len(self._distinct):
            self._distinct = np.concatenate([self._distinct, np.zeros_like(self._distinct)])
            more = np.zeros_like(self._num_in_output)
            self._num_in_output = np.concatenate([self._num_in_output, more])
        self._distinct[index] = token
        self._num_in_output[index] += 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append output tokens."""
        for token in token_ids:
            self.append(token)

    def truncate(self, length: int) -> None:
        """Remove all output from index `length` on; it must not be in the prompt."""
        assert length >= self.num_prompt_tokens, (length, self.num_prompt_tokens)
        while len(self) > length:
            token = self._token_ids.pop()
            index = self._indices[token]
            self._num_in_output[index] -= 1
            if index >= self._num_prompt_distinct and self._num_in_output[index] == 0:
                # It was the last distinct token, so `_distinct` stays ordered.
                del self._indices[token]

    def follow(self, start: int, token_ids: Sequence[int], *, is_end: bool) -> None:
        """Set the tokens from index `start` on to `token_ids`.

        Tokens after them are kept if `token_ids` change nothing, unless `is_end`.
        """
        assert start <= len(self), "tokens are missing"
        known = self._token_ids[start : start + len(token_ids)]
        num_same = len(known)
        if known != list(token_ids[:num_same]):
            pairs = zip(known, token_ids, strict=False)
            num_same = next(index for index, (old, new) in enumerate(pairs) if old != new)
        if num_same < len(token_ids) or is_end:
            self.truncate(start + num_same)
            self.extend(token_ids[num_same:])
