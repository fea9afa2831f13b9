"""How far drafts are right, by position, over the recent past."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

_HALF_LIFE_S = 10.0
_DECAY_PERIOD_S = 0.1
_FIRST_GUESS = 0.7
_GUESS_WEIGHT = 4.0
"""What is not known yet weighs as much as four drafts."""

_MOST_WEIGHT = 256.0
"""No more drafts than this count, so that a minute in which a position is not reached makes it
unknown again, however long it was known."""

_LEAST_WEIGHT = 16.0
"""The first position never weighs less once it did: what was learned before a pause is not
forgotten in it, and a handful of new drafts outweighs it."""


@dataclass
class _Position:
    """Drafts that came to be judged at a position, and those accepted there; decayed counts."""

    num_judged: float = 0.0
    num_accepted: float = 0.0

    def add(self, *, accepted: bool) -> None:
        self.num_judged += 1
        self.num_accepted += accepted
        self.scale(min(1.0, _MOST_WEIGHT / self.num_judged))

    def scale(self, factor: float) -> None:
        self.num_judged *= factor
        self.num_accepted *= factor


class AcceptanceWindow:
    """Acceptance by position over a window that fades, with a half-life of ten seconds.

    Position i is *judged* when a sequence was to draft i tokens or more and its first i - 1 were
    accepted. A draft that ended before, as a lookup's that found nothing, counts as rejected there:
    it yielded as little. So the expected yield needs to know nothing of how drafts are made.

    A position without recent data is taken to be as good as the one before it.
    """

    def __init__(self) -> None:
        self._positions = [_Position() for _ in range(MAX_NUM_SPECULATIVE_TOKENS)]
        self._decayed_at_s: float | None = None

    def record(self, num_asked: int, num_accepted: int, now_s: float) -> None:
        """Takes in one sequence's step, in which it was to draft `num_asked` tokens."""
        self._decay(now_s)
        for index in range(min(num_asked, num_accepted + 1)):
            self._positions[index].add(accepted=index < num_accepted)

    def expected_tokens(self, most: int, now_s: float) -> list[float]:
        """Tokens that a step yields a sequence with k = 0, 1, ... `most` tokens to draft."""
        self._decay(now_s)
        rate, reach, expected = _FIRST_GUESS, 1.0, [1.0]
        for position in self._positions[:most]:
            weighed = position.num_accepted + _GUESS_WEIGHT * rate
            rate = weighed / (position.num_judged + _GUESS_WEIGHT)
            reach *= rate
            expected.append(expected[-1] + reach)
        return expected

    def _decay(self, now_s: float) -> None:
        if self._decayed_at_s is None:
            self._decayed_at_s = now_s
        elapsed_s = now_s - self._decayed_at_s
        if elapsed_s < _DECAY_PERIOD_S:
            return
        self._decayed_at_s = now_s
        factor = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        first, *others = self._positions
        kept = min(first.num_judged, _LEAST_WEIGHT)
        if first.num_judged:
            first.scale(max(factor, kept / first.num_judged))
        for position in others:
            position.scale(factor)
