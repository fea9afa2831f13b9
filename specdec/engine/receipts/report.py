"""Results of the verification of a receipt."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from specdec.types.messages import Logprobs

_TOLERANCES = {"float32": 1e-3, "float16": 0.06, "bfloat16": 0.5}
_INT8_TOLERANCE, _ROUNDED_TOLERANCE = 0.01, 0.5
"""The first is for weights of 8 bits, the other for formats that round activations, or keys and
values: there a difference in the last bit between decode and prefill may become one in the first.
"""


def default_tolerance(dtype: str, quantization: str, kv_cache_dtype: str) -> float:
    """Return the tolerance for another implementation of a model's arithmetic."""
    exact = _TOLERANCES.get(dtype, _ROUNDED_TOLERANCE)
    if kv_cache_dtype == "auto" and quantization in ("none", "int8"):
        return max(exact, _INT8_TOLERANCE) if quantization == "int8" else exact
    return max(exact, _ROUNDED_TOLERANCE)


class Outcome(Enum):
    """Result of the verification of a receipt."""

    EQUAL = "equal"  # the model samples exactly these tokens
    TIE = "tie"  # some tokens are within the tolerance of those that the model samples
    IMPOSSIBLE = "impossible"  # the model with this seed cannot have produced a token, or the end
    FORGED = "forged"  # signature or digests do not match
    UNVERIFIABLE = "unverifiable"  # this model or this version cannot decide it


@dataclass(frozen=True)
class ImpossibleToken:
    """The first position that the claimed model could not have produced.

    position: index among the tokens of the choice. expected: the model's own token. margin: by how
    much the difference of two logits must change for the claimed token; None where no change
    suffices, as for a token that a rule masks, or for a wrong end.
    """

    position: int
    token_id: int
    expected: int | None
    margin: float | None
    reason: str


@dataclass(frozen=True)
class ChoiceReport:
    """Result of one choice. largest_tie: the greatest margin of a tie, 0 without one.

    num_resumed: leading tokens that the client supplied, which are not verified.
    """

    index: int
    num_tokens: int
    num_resumed: int = 0
    num_ties: int = 0
    largest_tie: float = 0.0
    impossible: ImpossibleToken | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome of the choice alone."""
        if self.impossible is not None:
            return Outcome.IMPOSSIBLE
        return Outcome.TIE if self.num_ties else Outcome.EQUAL

    def with_tokens(self, found: Logprobs, tolerance: float) -> ChoiceReport:
        """Add the comparison of `OutputReplay`, except for tokens that the client supplied."""
        margins, is_other = -found.logprobs[:, 0], found.ranks != 1
        is_other[: self.num_resumed] = False
        wrong = np.flatnonzero(is_other & ~(margins <= tolerance))
        first = len(margins) if not len(wrong) else int(wrong[0])
        ties = margins[:first][is_other[:first]]
        report = replace(self, num_ties=len(ties), largest_tie=float(ties.max(initial=0)))
        if first == len(margins):
            return report
        token_id, expected = map(int, found.token_ids[first])
        reason = "the model samples another token with this seed"
        margin = float(margins[first]) if np.isfinite(margins[first]) else None
        impossible = ImpossibleToken(first, token_id, expected, margin, reason)
        return replace(report, impossible=impossible)


@dataclass(frozen=True)
class ReceiptReport:
    """Result of a receipt. reason: why it is forged or unverifiable; else empty."""

    outcome: Outcome
    reason: str = ""
    tolerance: float = 0.0
    choices: tuple[ChoiceReport, ...] = ()

    @classmethod
    def of(cls, choices: tuple[ChoiceReport, ...], tolerance: float) -> ReceiptReport:
        """Return the report of choices that were replayed: the worst of their outcomes."""
        order = (Outcome.IMPOSSIBLE, Outcome.TIE, Outcome.EQUAL)
        worst = min((each.outcome for each in choices), key=order.index)
        return cls(worst, "", tolerance, choices)

    @property
    def is_verified(self) -> bool:
        """Return whether the receipt is what the claimed model samples."""
        return self.outcome in (Outcome.EQUAL, Outcome.TIE)

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "outcome": self.outcome.value}
