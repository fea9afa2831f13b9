"""Service curve: what the next request would get at each load, from costs and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.speculation.policy.expected_goodput import ExpectedGoodput
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import DraftShape, chain
from specdec.types.reports.service_curve import LEAST_RATE, MOST_RATE, ServiceCurve

_HOLDS_S = 1.0
_MOST_PROMPT_TOKENS = 2048
"""Prompt tokens of a step from which their rate is computed, where the step may have as many."""

ShapesOf = Callable[[int], Sequence[DraftShape]]
"""Returns the draft shapes that the settings in force allow to a number of decoding sequences."""


class CurveEstimator:
    """Curves of an engine, computed at most once a second."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Set the limits of a step."""
        self._limits = max_num_seqs, max_num_batched_tokens
        self._known: tuple[float, SpeculationControl, ServiceCurve] | None = None

    def at(
        self, now_s: float, expected: ExpectedGoodput, control: SpeculationControl, shapes: ShapesOf
    ) -> ServiceCurve:
        """Return the curve; new settings have a new one at once."""
        if self._known is not None:
            at_s, of, curve = self._known
            if of == control and now_s - at_s < _HOLDS_S:
                return curve
        curve = service_curve(expected, now_s, *self._limits, control.threshold, shapes)
        self._known = now_s, control, curve
        return curve


def service_curve(
    expected: ExpectedGoodput,
    now_s: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    threshold: int,
    shapes_of: ShapesOf,
) -> ServiceCurve:
    """Return the expected rates by load.

    - The numbers of streams are powers of two, the largest batch, and both sides of the threshold
      beyond which nothing drafts, where the rate may jump.
    - Each of n streams has goodput(n) / n: T(k) tokens a step over its seconds(n, k), with the
      allowed shape k of the highest goodput. T(0) is 1, so without drafts it is 1 / seconds(n, 0).
    - Prompts have c / seconds of a step with c of their tokens, one stream and no drafts.

    Rates have four digits. Sequences whose drafts are accepted more than the mean get more.
    """
    powers = (2**power for power in range(max_num_seqs.bit_length()))
    found = {*powers, threshold, threshold + 1, max_num_seqs}
    sizes = sorted(each for each in found if 0 < each <= max_num_seqs)
    rates = (max(expected.of(now_s, size, shapes_of(size))) / size for size in sizes)
    num_tokens = max(1, min(_MOST_PROMPT_TOKENS, max_num_batched_tokens - 1))
    costs = expected.costs
    step_s = costs.step_s(1, chain(0), now_s) + costs.prompt_s(1, 0, num_tokens, now_s)
    return ServiceCurve(tuple(sizes), tuple(map(_rounded, rates)), _rounded(num_tokens / step_s))


def _rounded(rate: float) -> float:
    """Return four digits of a rate, within the bounds of curves: a stall may be a long step."""
    return float(f"{min(MOST_RATE, max(LEAST_RATE, rate)):.4g}")
