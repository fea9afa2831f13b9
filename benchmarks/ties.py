"""Tie rule: the differences from a reference that floating point alone can explain.

Differently shaped forward passes round differently, so two tokens with almost equal scores may
swap. A difference is a tie when, at the first differing position, the generated token scores less
than TAU below the best one in the reference. Text after a tie continues from another prefix and
cannot be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TAU = 1e-3
"""Threshold for fp32: far above the effect of rounding, far below the gap of a wrong token."""


@dataclass(frozen=True)
class Candidates:
    """Best tokens of one output position in descending order, with their processed scores."""

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]

    def gap(self, token_id: int) -> float:
        """Return how far a token scores below the best; a lower bound if it is not listed."""
        listed = dict(zip(self.token_ids, self.scores, strict=True))
        return self.scores[0] - listed.get(token_id, self.scores[-1])

    def is_tied(self, token_id: int) -> bool:
        """Return whether rounding may have made this token the best."""
        return token_id in self.token_ids and self.gap(token_id) < TAU


@dataclass(frozen=True)
class Reference:
    """Expected output of a prompt; `candidates` has one entry per token."""

    prompt_id: str
    token_ids: tuple[int, ...]
    candidates: tuple[Candidates, ...]

    def __post_init__(self) -> None:
        assert len(self.candidates) == len(self.token_ids)


@dataclass(frozen=True)
class Difference:
    """First position at which an output differs from its reference.

    expected, got: token ids; None if that side has ended.
    gap: between the reference's best score and that of the generated token; None at an end.
    """

    prompt_id: str
    position: int
    expected: int | None
    got: int | None
    gap: float | None
    is_tie: bool

    def __str__(self) -> str:
        verdict = "tie" if self.is_tie else "WRONG"
        gap = "" if self.gap is None else f", gap {self.gap:.2e}"
        place = f"{self.prompt_id} at {self.position}"
        return f"{verdict}: {place}: expected {self.expected}, got {self.got}{gap}"


def first_difference(reference: Reference, token_ids: Sequence[int]) -> Difference | None:
    """Compare an output with its reference; return None if they are equal."""
    expected = reference.token_ids
    if tuple(token_ids) == expected:
        return None
    shared = zip(expected, token_ids, strict=False)
    unequal = (index for index, (a, b) in enumerate(shared) if a != b)
    position = next(unequal, min(len(expected), len(token_ids)))
    if position in (len(expected), len(token_ids)):
        # One is a prefix of the other. The end-of-sequence token is part of an output, so a tie
        # cannot change a length without a differing token.
        ends = [ids[position] if position < len(ids) else None for ids in (expected, token_ids)]
        return Difference(reference.prompt_id, position, ends[0], ends[1], None, is_tie=False)
    got, best = token_ids[position], reference.candidates[position]
    return Difference(
        prompt_id=reference.prompt_id,
        position=position,
        expected=expected[position],
        got=got,
        gap=best.gap(got),
        is_tie=best.is_tied(got),
    )


def argmax_differences(reference: Reference) -> list[Difference]:
    """Return each position whose token is not the best one by the reference's own scores."""
    return [
        Difference(
            prompt_id=reference.prompt_id,
            position=position,
            expected=best.token_ids[0],
            got=token_id,
            gap=best.gap(token_id),
            is_tie=best.is_tied(token_id),
        )
        for position, (token_id, best) in enumerate(
            zip(reference.token_ids, reference.candidates, strict=True)
        )
        if token_id != best.token_ids[0]
    ]
