"""Budget of a step by slot: which draft tokens of which sequences are worth their rows.

Sequences differ in how often their drafts are accepted. Where verified rows cost time, the slots
that rarely survive are left out, and others can be longer for the same time. Where sequences do not
differ by more than chance, all have the same length.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from specdec.speculation.policy.cost_model import range_of
from specdec.types.drafts.draft_decision import DraftAhead, DraftShape
from specdec.types.drafts.draft_survival import AcceptanceHistory
from specdec.types.drafts.slot_rule import SlotRule, survivals

_LEAST_SURVIVALS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)
_LEAST_GAIN = 1.02
"""Least goodput over that of equal lengths for which slots are left out."""

_REFRESH_S, _LEAST_REFRESH_S = 1.0, 0.1
"""Time between divisions, which take some milliseconds, and that after a change of the batch."""

_HALF_LIFE_S = 10.0
"""That of the acceptance estimates, which are of the slots that were in force."""

_LEAST_SEQUENCES = 4
_LEAST_ACCEPTED = 1e-3

_LEAST_WEIGHT, _MOST_WEIGHT = 2.0, 12.0
"""Bounds of the weight of the common rate; beyond, sequences hardly differ."""

_SPREAD_RATE = 0.1
"""Part of the error of the sequences' spread that a division corrects."""


class SlotPlan(NamedTuple):
    """Slots of a draft shape.

    rule: None for all slots. num_rows, num_accepted: draft tokens of a sequence, and those of them
    that are expected to be accepted, on average.
    """

    rule: SlotRule | None
    num_rows: float
    num_accepted: float


class SlotBudget:
    """Plans of slots by draft shape, renewed every second."""

    def __init__(self) -> None:
        self._histories: Sequence[AcceptanceHistory] = ()
        self._spread = 0.0  # variance of the sequences' rates, without that by chance
        self._plans: dict[DraftShape, SlotPlan] = {}
        self._applied: SlotRule | None = None  # in the last step
        self._measured: dict[DraftShape, float] = {}  # accepted tokens of the slots in force
        self._renewed_at_s = -math.inf
        self._range = -1  # of batch sizes

    def is_due(self, now_s: float, num_decoding: int) -> bool:
        """Return whether to observe sequences and renew the plans."""
        is_of_range = range_of(num_decoding) == self._range
        return now_s - self._renewed_at_s >= (_REFRESH_S if is_of_range else _LEAST_REFRESH_S)

    def observe(self, histories: Sequence[AcceptanceHistory]) -> None:
        """Record the decoding sequences of a step."""
        self._histories = histories

    def plan(self, shape: DraftShape) -> SlotPlan | None:
        """Return the plan of a shape; None for all slots."""
        return self._plans.get(shape)

    def apply(self, shape: DraftShape) -> SlotRule | None:
        """Return the rule of a step with a shape; None for all slots."""
        plan = self._plans.get(shape)
        self._applied = plan.rule if plan is not None else None
        return self._applied

    def renew(
        self,
        now_s: float,
        num_decoding: int,
        tokens: dict[DraftShape, float],
        step_s: Callable[[DraftShape, float | None], float],
    ) -> None:
        """Renew the plans.

        tokens: expected of a sequence and step, by shape, for the slots that were in force.
        step_s: seconds of a step with a shape and a number of draft rows of each sequence.
        """
        elapsed_s = min(now_s - self._renewed_at_s, 100 * _HALF_LIFE_S)
        self._renewed_at_s, self._range = now_s, range_of(num_decoding)
        prior = self._prior()
        rule, self._plans = self._applied, {}
        if prior is None:
            self._measured.clear()
            return
        table = _SlotTable(self._histories, prior, max(shape.depth for shape in tokens))
        least_in_force = 0.0 if rule is None else rule.least_survival
        kept = math.pow(0.5, elapsed_s / _HALF_LIFE_S)
        for shape, expected in tokens.items():
            if shape.num_draft_tokens < 1 or shape.is_tree or shape.ahead is not DraftAhead.OFF:
                continue
            now = table.slots(shape.depth, least_in_force).num_accepted
            measured = max(_LEAST_ACCEPTED, self._measured.get(shape, now))
            self._measured[shape] = measured = kept * measured + (1 - kept) * now
            scale = (expected - 1) / measured
            self._plans[shape] = self._best(shape, table, prior, scale, step_s)

    def _best(
        self,
        shape: DraftShape,
        table: _SlotTable,
        prior: AcceptanceHistory,
        scale: float,
        step_s: Callable[[DraftShape, float | None], float],
    ) -> SlotPlan:
        """Return the plan with the highest goodput. scale: accepted tokens over their estimate."""
        whole = table.slots(shape.depth, 0.0)
        best = SlotPlan(None, whole.num_rows, scale * whole.num_accepted)
        least = _LEAST_GAIN * (1 + best.num_accepted) / step_s(shape, None)
        for least_survival in _LEAST_SURVIVALS:
            kept = table.slots(shape.depth, least_survival)
            if kept.num_rows in (0.0, whole.num_rows):
                continue
            goodput = (1 + scale * kept.num_accepted) / step_s(shape, kept.num_rows)
            if goodput > least:
                rule = SlotRule(least_survival, prior)
                best, least = SlotPlan(rule, kept.num_rows, scale * kept.num_accepted), goodput
        return best

    def _prior(self) -> AcceptanceHistory | None:
        """Return the prior of a sequence's rate; None where they do not differ, or are few.

        The spread of their rates is estimated by the method of moments for beta-binomial counts.
        """
        known = [(each.num_verified, each.num_accepted) for each in self._histories]
        known = [each for each in known if each[0] >= 1]
        if len(known) < _LEAST_SEQUENCES:
            return None
        total = sum(verified for verified, _ in known)
        rate = sum(accepted for _, accepted in known) / total
        chance = rate * (1 - rate)
        squares = sum((accepted - rate * verified) ** 2 / verified for verified, accepted in known)
        effective = total - sum(verified**2 for verified, _ in known) / total
        spread = (squares - (len(known) - 1) * chance) / effective
        self._spread += _SPREAD_RATE * (spread - self._spread)
        if self._spread <= 0 or chance <= 0:
            return None
        weight = max(_LEAST_WEIGHT, chance / self._spread - 1)
        return AcceptanceHistory(weight, weight * rate) if weight < _MOST_WEIGHT else None


class _Slots(NamedTuple):
    """Draft tokens of a sequence, and those of them that are accepted, on average."""

    num_rows: float
    num_accepted: float


class _SlotTable:
    """Slots of all sequences by draft position and by the least survival that they have."""

    def __init__(
        self, histories: Sequence[AcceptanceHistory], prior: AcceptanceHistory, depth: int
    ) -> None:
        num_bins = 1 + len(_LEAST_SURVIVALS)
        self._num_sequences = len(histories)
        rows = [[0] * num_bins for _ in range(depth)]
        accepted = [[0.0] * num_bins for _ in range(depth)]
        for history in histories:
            for position, own in enumerate(survivals(history, prior, depth)):
                place = bisect_right(_LEAST_SURVIVALS, own)
                rows[position][place] += 1
                accepted[position][place] += own
        self._rows, self._accepted = _sums(rows), _sums(accepted)

    def slots(self, depth: int, least_survival: float) -> _Slots:
        """Return the slots of the first positions with at least one of `_LEAST_SURVIVALS`, or 0."""
        place = bisect_right(_LEAST_SURVIVALS, least_survival)
        found = (each[depth - 1][place] for each in (self._rows, self._accepted))
        return _Slots(*(each / self._num_sequences for each in found))


def _sums(table: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the sums over the first positions and the last bins."""
    by_bin = [list(accumulate(reversed(row)))[::-1] for row in table]
    return [list(map(sum, zip(*by_bin[: count + 1], strict=True))) for count in range(len(by_bin))]
