"""Simulated batches of 1 to 256 sequences on an H100, by the costs that it was measured to have.

In steps without drafts the device's work hides the host's; steps with drafts of a lookup do not.
So drafts pay for few sequences and lose for many, by costs that a profile may underestimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from tests.specdec.speculation.policy.synthetic_service import Clock, SyntheticService

MAX_DRAFT_TOKENS = 5
RATES = (0.777,) * MAX_DRAFT_TOKENS
"""Acceptance by position, of 3.5 accepted tokens a step with five drafts."""

_MAX_STEP_TOKENS = 2048
_NUM_TOKENS = (1, 16, 64, 128, 256, 341, 672, 850, 1536)
_DEVICE_MS = (6.44, 6.7, 7.06, 7.85, 10.5, 10.9, 17.9, 24.2, 44.8)
"""Milliseconds of a pass of Llama-3.1-8B over these tokens: part `speculation` of
docs/benchmarks/gpu-check.json, steps without the host's part; the last one by the slope before."""

_SIZES = (1, 4, 16, 64, 128, 256)


@dataclass(frozen=True)
class GpuCosts:
    """Seconds of a step on an H100 whose drafts are looked up.

    host_ms, host_row_ms: of the host in a step with drafts, and of each of its sequences.
    """

    host_ms: float = 1.4
    host_row_ms: float = 0.066

    def step_s(
        self,
        num_decoding: int,
        num_draft_tokens: int,
        num_drafting: int | None = None,
        num_rows: int | None = None,
    ) -> float:
        """Return the seconds of a step, without noise; num_drafting: sequences, None for all.

        num_rows: not less than that of all their draft tokens.
        """
        num_drafting = num_decoding if num_drafting is None else num_drafting
        return self._step_s(num_decoding, num_draft_tokens, num_drafting, 1.0)

    def table(self, seen: float = 1.0, added_row_ms: float = 0.0) -> CostTable:
        """Return the table of a profile.

        seen: share of the host's time that it finds in steps with drafts. added_row_ms: of each
        sequence, that it finds in those without, though the device's work hides it.
        """
        counts = (0, 1, MAX_DRAFT_TOKENS // 2, MAX_DRAFT_TOKENS)
        seconds = tuple(
            tuple(
                self._step_s(size, count, size, seen) + (0 if count else added_row_ms * size / 1e3)
                for count in counts
            )
            for size in _SIZES
        )
        return CostTable(_SIZES, counts, seconds)

    def plain_rate(self, num_decoding: int) -> float:
        """Return the tokens per second without drafts."""
        return num_decoding / self.step_s(num_decoding, 0)

    def best_rate(self, num_decoding: int) -> float:
        """Return the tokens per second of the best number of drafts that a step has room for."""
        tokens = accumulate(accumulate(RATES, float.__mul__, initial=1.0))
        most = (_MAX_STEP_TOKENS - num_decoding) // 2 // num_decoding
        return max(
            num_decoding * expected / self.step_s(num_decoding, count)
            for count, expected in enumerate(tokens)
            if count <= most
        )

    def _step_s(self, num_decoding: int, count: int, num_drafting: int, seen: float) -> float:
        num_tokens = num_decoding + num_drafting * count
        device_ms = float(np.interp(num_tokens, _NUM_TOKENS, _DEVICE_MS))
        host_ms = self.host_ms + self.host_row_ms * num_decoding if count else 0.0
        return (device_ms + seen * host_ms) / 1e3


@dataclass(frozen=True)
class Window:
    """Some steps: tokens per second over those without drafts, and over the best number of them.

    chosen: steps by number of drafts.
    """

    over_off: float
    over_best: float
    chosen: Counter[int]


class GpuService:
    """A service on a simulated H100 under the default policy."""

    def __init__(self, costs: GpuCosts, table: CostTable, seed: int = 0) -> None:
        """table: of the profile."""
        clock = Clock()
        self._costs = costs
        self._service = SyntheticService(costs, RATES, clock, seed=seed, noise=0.02, stall=0.0)
        self._policy = SpeculationPolicy(
            SpeculationControl("auto", max(_SIZES), MAX_DRAFT_TOKENS),
            clock,
            choosers={None: GoodputChooser(CostModel(table))},
            max_num_batched_tokens=_MAX_STEP_TOKENS,
        )

    def run(self, num_decoding: int, num_steps: int) -> Window:
        """Run steps of a batch."""
        return self.run_in_turn([num_decoding], num_steps)

    def run_in_turn(self, sizes: Sequence[int], num_rounds: int) -> Window:
        """Run a step of a batch of each size in each round."""
        service, before = self._service, self._service.num_tokens
        begun_s, chosen = service.clock.now_s, service.chosen.copy()
        for num_decoding in list(sizes) * num_rounds:
            service.step(self._policy, num_decoding)
        rate = (
            1.01 * (service.num_tokens - before) / (service.clock.now_s - begun_s)
        )  # of the noise
        off = _mean_rate(sizes, self._costs.plain_rate)
        best = _mean_rate(sizes, self._costs.best_rate)
        return Window(rate / off, rate / best, service.chosen - chosen)


def _mean_rate(sizes: Sequence[int], rate_of: Callable[[int], float]) -> float:
    """Return the tokens per second of a batch of each size in turn, a token of each sequence."""
    return sum(sizes) / sum(size / rate_of(size) for size in sizes)
