"""Simulated bursts of requests with prompts, drafted for by a head, on a simulated clock.

Requests arrive together, so that prompts are computed beside sequences that decode already, and end
one after the other. The head computes its KV of a text when it first drafts after it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.drafts.draft_decision import PromptLoad
from tests.specdec.speculation.policy.synthetic_service import Clock

MAX_STEP_TOKENS = 256
MAX_PROMPT_TOKENS = 64
"""Most tokens of a step, and of those of prompts beside sequences that decode: as on a CPU."""


@dataclass(frozen=True)
class HeadCosts:
    """Seconds of a step, whose target reads its weights once and computes rows at the same time.

    weights_s, row_s: of the target. draft_s, drafted_row_s: of each draft token, for all sequences
    and for each one. pair_s: of the head's KV of a token.
    """

    weights_s: float = 0.009
    row_s: float = 0.0026
    draft_s: float = 0.0008
    drafted_row_s: float = 0.0003
    pair_s: float = 0.00005

    def target_s(self, num_rows: int) -> float:
        """Return the seconds of a pass over rows."""
        compute_s = self.row_s * num_rows
        return max(compute_s, self.weights_s) + 0.2 * min(compute_s, self.weights_s)

    def step_s(self, num_rows: int, num_pairs: int, num_drafting: int, count: int) -> float:
        """Return the seconds of a step in which some sequences draft `count` tokens each."""
        drafts_s = count * (self.draft_s + self.drafted_row_s * num_drafting) if num_drafting else 0
        return self.target_s(num_rows) + self.pair_s * num_pairs + drafts_s

    def table(self, most: int, wrong_by: float = 1.0) -> CostTable:
        """Return the table of a start-up measurement; `wrong_by` multiplies the cost of drafts."""
        sizes, counts = (1, 4, 16, 64), tuple(sorted({0, 1, most // 2, most}))

        def cost(size: int, count: int) -> float:
            plain_s = self.target_s(size)
            rows = size * (1 + count)
            drafted_s = self.step_s(rows, rows, size, count) if count else plain_s
            return plain_s + wrong_by * (drafted_s - plain_s)

        seconds = tuple(tuple(cost(size, count) for count in counts) for size in sizes)
        return CostTable(sizes, counts, seconds)


@dataclass
class _Stream:
    """A request. num_missing: tokens without the head's KV. num_drafted: of its present draft."""

    num_prompt_left: int
    num_left: int
    num_missing: int = 0
    num_drafted: int = 0


@dataclass
class BurstService:
    """Simulated service with a head.

    acceptance: probability by position, given those before. chosen: steps by draft length.
    """

    costs: HeadCosts
    acceptance: Sequence[float]
    clock: Clock
    noise: float = 0.05
    chosen: Counter[int] = field(default_factory=Counter)

    def run(
        self, policy: SpeculationPolicy, num_streams: int, num_tokens: int, seed: int = 0
    ) -> float:
        """Run a burst to its end; return its seconds. Bursts of a seed have equal prompts."""
        begun_s, self._random = self.clock.now_s, random.Random(seed)
        lengths = [self._random.randrange(40, 160) for _ in range(num_streams)]
        self._streams = [_Stream(length, num_tokens) for length in lengths]
        while self._streams:
            self._step(policy)
        return self.clock.now_s - begun_s

    def _step(self, policy: SpeculationPolicy) -> None:
        """Run a step: decide, compute, verify."""
        decoding = [each for each in self._streams if not each.num_prompt_left]
        most = MAX_PROMPT_TOKENS if decoding else MAX_STEP_TOKENS
        num_waiting = sum(each.num_prompt_left for each in self._streams)
        prompts = PromptLoad(min(most, num_waiting), len(self._streams) - len(decoding))
        decision = policy.decide(len(decoding), prompts=prompts)
        count = decision.num_draft_tokens
        drafting = decoding[: decision.num_drafting] if count else []
        drafts = [min(count, each.num_drafted) for each in drafting]
        num_rows = len(decoding) + sum(drafts)
        num_prompt_tokens = self._run_prompts(most)
        if decoding:
            policy.begin_step(
                len(drafting), sum(map(bool, drafts)), has_prefill=num_prompt_tokens > 0
            )
            self.chosen[count] += 1
        accepted = [self._num_accepted(each) for each in drafts]
        for each in decoding:
            each.num_left -= 1
            each.num_missing += 1
        for each, num_accepted in zip(drafting, accepted, strict=True):
            each.num_left -= num_accepted
            each.num_missing += num_accepted
        num_pairs = self._draft(decision.num_drafting, drafting, count)
        noise = 1 + self.noise * self._random.random()
        seconds = self.costs.step_s(num_rows + num_prompt_tokens, num_pairs, len(drafting), count)
        self.clock.now_s += noise * seconds
        for drafted, num_accepted in zip(drafts, accepted, strict=True):
            policy.observe_rows(1, count, drafted, num_accepted)
        policy.end_step()
        self._streams = [each for each in self._streams if each.num_left > 0]

    def _run_prompts(self, most: int) -> int:
        """Compute the next tokens of prompts; return their number."""
        num_left = most
        for each in self._streams:
            size = min(each.num_prompt_left, num_left)
            each.num_prompt_left -= size
            each.num_missing += size
            num_left -= size
        return most - num_left

    def _draft(self, limit: int | None, drafting: Sequence[_Stream], count: int) -> int:
        """Let the head compute what it lacks, and draft; return the tokens that it lacked.

        Without a limit it also computes those of prompts.
        """
        for each in self._streams:
            each.num_drafted = 0
        if not count:
            return 0
        num_left = MAX_STEP_TOKENS
        for each in drafting if limit is not None else self._streams:
            size = min(each.num_missing, num_left)
            each.num_missing -= size
            num_left -= size
            each.num_drafted = 0 if each.num_missing or each.num_prompt_left else count
        return MAX_STEP_TOKENS - num_left

    def _num_accepted(self, num_drafted: int) -> int:
        accepted = 0
        while accepted < num_drafted and self._random.random() < self.acceptance[accepted]:
            accepted += 1
        return accepted
