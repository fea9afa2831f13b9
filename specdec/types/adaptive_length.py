"""How long each sequence's next draft is: by what came of its last one, and by what is left to all.

Both are decided before a token is drafted, from verified drafts alone. So no draft token's value
has a say in whether it is verified, which is what verification by chances needs to be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import MAX_NUM_SPECULATIVE_TOKENS


@dataclass(frozen=True)
class DraftLength:
    """Of one sequence, in tokens: what it began with, and what it is now."""

    start: int
    num_tokens: int


@dataclass(frozen=True)
class LengthRule:
    """Changes a sequence's draft length after each of its verified drafts.

    min_tokens, max_tokens: bounds of change; a start beyond them holds until the first change.
    raise_above, lower_below: shares of a draft's tokens that were accepted.

    A draft that came true says that a longer one may pay, not how much longer: the length doubles.
    One that failed says less, as it may have failed by its first token whatever its length: one
    token is taken off. (Transformers' heuristic schedule adds two and takes off one.)
    """

    min_tokens: int = 1
    max_tokens: int = 8
    raise_above: float = 0.8
    lower_below: float = 0.4

    def __post_init__(self) -> None:
        _require("min", self.min_tokens, 1, MAX_NUM_SPECULATIVE_TOKENS)
        _require("max", self.max_tokens, self.min_tokens, MAX_NUM_SPECULATIVE_TOKENS)
        _require("raise_above", self.raise_above, 0, 1)
        _require("lower_below", self.lower_below, 0, self.raise_above)

    def begin(self, length: DraftLength | None, start: int) -> DraftLength:
        """`length`, unless there is none yet or it began with something else."""
        if length is None or length.start != start:
            return DraftLength(start, start)
        return length

    def after(self, length: DraftLength, num_drafted: int, num_accepted: int) -> DraftLength:
        """The length after a draft of which a prefix was accepted; an empty one changes nothing.

        A draft shorter than `length`, since its proposer knew no more or the batch had no room,
        never makes the next ones longer: nothing was learned about such lengths.
        """
        if num_drafted == 0:
            return length
        share, num_tokens = num_accepted / num_drafted, length.num_tokens
        if share > self.raise_above and num_drafted >= num_tokens:
            num_tokens = max(num_tokens, min(self.max_tokens, 2 * num_tokens))
        elif share < self.lower_below:
            num_tokens = min(num_tokens, max(self.min_tokens, num_tokens - 1))
        return DraftLength(length.start, num_tokens)


def draft_budget(num_batched_tokens: int, num_decoding: int) -> int:
    """Most guesses of a step: half of what is left over, so that prefill always moves on."""
    return (num_batched_tokens - num_decoding) // 2


def share_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Divides `budget` tokens: nobody gets more than is wanted, nor less than others with a wish.

    So a shortage shortens the longest drafts first, whose last tokens are the least likely to be
    accepted. What cannot be divided goes to the first.
    """
    shares = [0] * len(wanted)
    if not any(wanted):
        return shares
    shortest_first = sorted(range(len(wanted)), key=lambda index: (wanted[index], -index))
    for place, index in enumerate(shortest_first):
        shares[index] = min(wanted[index], budget // (len(wanted) - place))
        budget -= shares[index]
    return shares


def _require(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        field = f"speculative_config.adaptive_length_{name}"
        raise InvalidValueError(field, value, f"from {low} to {high}")
