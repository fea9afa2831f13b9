"""The tie rule: which differences from a reference floating point alone can explain.

Differently shaped forward passes round differently, so two tokens whose scores are all but equal
may change places. A difference is a tie when, at the first position that differs, the token that
was generated scores less than TAU below the best one in the reference. What follows a tie
continues another text and cannot be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TAU = 1e-3
"""For fp32: far above what its rounding moves a score by, far below what a wrong token misses."""


@dataclass(frozen=True)
class Candidates:
    """The best tokens of one output position, best first, with their processed scores."""

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]

    def gap(self, token_id: int) -> float:
        """How far a token scores below the best; of one not listed, as far as the last or more."""
        listed = dict(zip(self.token_ids, self.scores, strict=True))
        return self.scores[0] - listed.get(token_id, self.scores[-1])

    def is_tied(self, token_id: int) -> bool:
        """Whether rounding may have made this token the best."""
        return token_id in self.token_ids and self.gap(token_id) < TAU


@dataclass(frozen=True)
class Reference:
    """What should be generated for a prompt; `candidates` has one entry a token."""

    prompt_id: str
    token_ids: tuple[int, ...]
    candidates: tuple[Candidates, ...]

    def __post_init__(self) -> None:
        assert len(self.candidates) == len(self.token_ids)


@dataclass(frozen=True)
class Difference:
    """The first position where an output leaves its reference.

    expected, got: token ids; None where the one side has ended. gap: between the reference's best
    score and that of the token that was generated; None where an end makes it meaningless.
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
    """Judges an output; None when it equals the reference."""
    expected = reference.token_ids
    if tuple(token_ids) == expected:
        return None
    shared = zip(expected, token_ids, strict=False)
    unequal = (index for index, (a, b) in enumerate(shared) if a != b)
    position = next(unequal, min(len(expected), len(token_ids)))
    if position in (len(expected), len(token_ids)):
        # One is the other's beginning. The token that ends a text is part of it, so no tie ends
        # or prolongs one without a different token.
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
    """Every position whose token is not the best one by the reference's own scores."""
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
