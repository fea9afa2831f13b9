"""Schedule of draft lengths by batch size, from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

_FIELD = "speculative_config.num_speculative_tokens_per_batch_size"


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
