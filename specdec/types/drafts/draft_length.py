"""Adaptive draft length of each sequence, and the division of a step's budget among sequences.

Both are decided before a token is drafted, from verified drafts alone. Thus whether a draft token
is verified does not depend on its value, which rejection sampling requires to be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS
from specdec.types.validation import require_range

_FIELD = "speculative_config.num_speculative_tokens_per_batch_size"


@dataclass(frozen=True)
class DraftLength:
    """Draft length of one sequence in tokens: the initial and the present one."""

    start: int
    num_tokens: int


@dataclass(frozen=True)
class LengthRule:
    """Rule that changes a sequence's draft length after each of its verified drafts.

    configured: draft length to begin with. Another one, which operators or their rules have set, is
    the maximum, too.
    min_tokens, max_tokens: bounds of change; a start beyond them holds until the first change.
    raise_above, lower_below: shares of a draft's tokens that were accepted.

    After an accepted draft a longer one may pay, by an unknown amount: the length doubles. A
    rejected draft is weaker evidence, since its first token may have failed whatever its length:
    the length decreases by one. (Transformers' heuristic schedule adds two and subtracts one.)
    """

    min_tokens: int = 1
    max_tokens: int = 8
    configured: int | None = None
    raise_above: float = 0.8
    lower_below: float = 0.4

    def __post_init__(self) -> None:
        key, most = "speculative_config.adaptive_length", MAX_NUM_SPECULATIVE_TOKENS
        require_range(f"{key}_min", self.min_tokens, 1, most)
        require_range(f"{key}_max", self.max_tokens, self.min_tokens, most)
        require_range(f"{key}_raise_above", self.raise_above, 0, 1)
        require_range(f"{key}_lower_below", self.lower_below, 0, self.raise_above)

    def longest(self, number: int) -> int:
        """Return the longest draft where `number` draft tokens are in force."""
        return self.max_tokens if number == self.configured else number

    def begin(self, length: DraftLength | None, start: int) -> DraftLength:
        """Return `length`, or a new one if there is none or it started with another number."""
        if length is None or length.start != start:
            return DraftLength(start, start)
        return length

    def after(self, length: DraftLength, num_drafted: int, num_accepted: int) -> DraftLength:
        """Return the length after a verified draft; an empty one has no effect.

        A draft shorter than `length`, because the proposer or the budget ended it, never increases
        the length: it is no evidence about longer drafts.
        """
        if num_drafted == 0:
            return length
        share, num_tokens = num_accepted / num_drafted, length.num_tokens
        if share > self.raise_above and num_drafted >= num_tokens:
            num_tokens = max(num_tokens, min(self.max_tokens, 2 * num_tokens))
        elif share < self.lower_below:
            num_tokens = min(num_tokens, max(self.min_tokens, num_tokens - 1))
        return DraftLength(length.start, num_tokens)


@dataclass(frozen=True)
class LengthSchedule:
    """vLLM's `num_speculative_tokens_per_batch_size`: rows of (first, last, k), both ends included.

    The rows begin with batch size 1 and leave no gap. Larger batches take the k of the last row.
    """

    rows: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        expected = 1
        for index, row in enumerate(self.rows):
            _check_row(f"{_FIELD}[{index}]", row, expected)
            expected = row[1] + 1
        if not self.rows:
            raise InvalidValueError(_FIELD, self.rows, "one row or more")

    @property
    def most(self) -> int:
        """The largest number of draft tokens of any row."""
        return max(count for _, _, count in self.rows)

    def num_draft_tokens(self, num_decoding: int) -> int:
        """Return the k for a batch size of 1 or more."""
        for _, last, count in self.rows:
            if num_decoding <= last:
                return count
        return self.rows[-1][2]


def _check_row(name: str, row: Sequence[int], expected_first: int) -> None:
    if len(row) != 3 or any(type(value) is not int for value in row):
        raise InvalidValueError(name, row, "three whole numbers: first and last batch size, k")
    first, last, count = row
    if first != expected_first:
        limit = f"a row that begins with {expected_first}, so that there is neither gap nor overlap"
        raise InvalidValueError(name, row, limit)
    if last < first:
        raise InvalidValueError(name, row, "a row whose last batch size is not below its first")
    if not 0 <= count <= MAX_NUM_SPECULATIVE_TOKENS:
        raise InvalidValueError(name, row, f"a row with k from 0 to {MAX_NUM_SPECULATIVE_TOKENS}")


def draft_budget(num_batched_tokens: int, num_decoding: int) -> int:
    """Return the most draft tokens of a step: half of the rest, so that prefill always proceeds."""
    return (num_batched_tokens - num_decoding) // 2


def share_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Divide `budget` tokens by max-min fairness: no share exceeds what is wanted.

    A shortage shortens the longest drafts first, whose last tokens are the least likely to be
    accepted. The remainder of the division goes to the first.
    """
    shares = [0] * len(wanted)
    if not any(wanted):
        return shares
    if sum(wanted) <= budget:
        return list(wanted)
    shortest_first = sorted(range(len(wanted)), key=lambda index: (wanted[index], -index))
    for place, index in enumerate(shortest_first):
        shares[index] = min(wanted[index], budget // (len(wanted) - place))
        budget -= shares[index]
    return shares
