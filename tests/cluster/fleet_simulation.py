"""Simulation of a fleet: requests, engines that speculate by policy, and Serve's autoscaler.

Each replica runs steps of the synthetic target on a separate clock, which is advanced to the next
second; every two seconds the autoscaler looks at the mean load of the last ten.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from cluster.config.serve_config import ServeConfig
from cluster.replica.report import ReplicaLoad
from cluster.serve.autoscaling import LOAD, autoscaling_config, num_replicas
from tests.clock import Clock
from tests.specdec.speculation.policy.synthetic_service import CostCurve, auto_policy

_LOOK_BACK_S = 12
_PERIOD_S = 2


class SimulatedReplica:
    """Replica with continuous batching; requests beyond the batch wait."""

    def __init__(
        self, curve: CostCurve, acceptance: tuple[float, ...], config: ServeConfig, now_s: float
    ) -> None:
        self.clock = Clock(now_s)
        most, target = len(acceptance), config.target_requests_per_replica
        self.policy = auto_policy(
            self.clock, curve.table(most), most, max_num_seqs=config.max_num_seqs
        )
        self._load = ReplicaLoad(target, self.clock)
        self._num_tokens = 0
        self.num_left: list[int] = []  # tokens of each request, those that wait last
        self.loads: deque[float] = deque(maxlen=_LOOK_BACK_S // _PERIOD_S)
        self._curve = curve
        self._acceptance = acceptance
        self._max_num_seqs = config.max_num_seqs
        self._random = random.Random(7)

    def run_until(self, now_s: float) -> None:
        while self.clock.now_s < now_s and self.num_left:
            self._step()
        self.clock.now_s = max(self.clock.now_s, now_s)

    def report_load(self) -> None:
        curve = self.policy.service_curve
        capacity = curve.batch_tokens_per_s(self._load.target_requests) if curve else None
        self.loads.append(self._load.requests(len(self.num_left), self._num_tokens, capacity))

    def _step(self) -> None:
        size = min(len(self.num_left), self._max_num_seqs)
        count = self.policy.decide(size).num_draft_tokens
        drafting = size if count else 0
        self.policy.begin_step(drafting, drafting, has_prefill=False)
        self.clock.now_s += self._curve.step_s(size, count)
        accepted = [self._num_accepted(count) for _ in range(size)]
        for index, number in enumerate(accepted):
            self.num_left[index] -= 1 + number
        self._num_tokens += size + sum(accepted)
        for number, num_rows in Counter(accepted).items():
            self.policy.observe_rows(num_rows, count, count, number)
        self.policy.end_step()
        self.num_left = [left for left in self.num_left if left > 0]

    def _num_accepted(self, count: int) -> int:
        accepted = 0
        while accepted < count and self._random.random() < self._acceptance[accepted]:
            accepted += 1
        return accepted


@dataclass
class Moment:
    """State of the fleet at one second."""

    at_s: float
    num_replicas: int
    num_chosen: float  # mean over the replicas that run
    num_open: int


@dataclass
class SimulatedFleet:
    """Replicas that get `rate(time)` requests per second of `num_tokens` each.

    set_wall_clock: called before the autoscaler, which uses that clock.
    """

    rate: Callable[[float], float]
    curve: CostCurve
    acceptance: tuple[float, ...]
    config: ServeConfig
    set_wall_clock: Callable[[float], None]
    num_tokens: int = 100
    replicas: list[SimulatedReplica] = field(default_factory=list)
    history: list[Moment] = field(default_factory=list)

    def run(self, seconds: int) -> None:
        scaling, state, due = autoscaling_config(self.config), {}, 0.0
        decide = _apply_autoscaling_config(num_replicas)
        self._scale_to(1, 0.0)
        for second in range(seconds):
            due += self.rate(second)
            while due >= 1:
                due -= 1
                min(self.replicas, key=lambda each: len(each.num_left)).num_left.append(
                    self.num_tokens
                )
            for replica in self.replicas:
                replica.run_until(second + 1)
            if second % _PERIOD_S == 0:
                for replica in self.replicas:
                    replica.report_load()
                self.set_wall_clock(float(second))
                wanted, state = decide(self._context(scaling, state, float(second)))
                self._scale_to(min(wanted, scaling.max_replicas), second + 1)
            self._note(second)

    @property
    def changes(self) -> list[tuple[float, int]]:
        """When the number of replicas changed, and to what."""
        pairs = zip(self.history, self.history[1:], strict=False)
        return [(b.at_s, b.num_replicas) for a, b in pairs if a.num_replicas != b.num_replicas]

    def _note(self, second: int) -> None:
        chosen = [each.policy.decision.num_draft_tokens for each in self.replicas]
        num_open = sum(len(each.num_left) for each in self.replicas)
        self.history.append(Moment(second, len(self.replicas), sum(chosen) / len(chosen), num_open))

    def _scale_to(self, wanted: int, now_s: float) -> None:
        while len(self.replicas) < wanted:
            self.replicas.append(SimulatedReplica(self.curve, self.acceptance, self.config, now_s))
        while len(self.replicas) > wanted:  # its requests are drained to the others
            self.replicas[0].num_left += self.replicas.pop().num_left

    def _context(self, scaling, state, now_s: float) -> AutoscalingContext:  # type: ignore[no-untyped-def]
        loads = {
            index: math.fsum(each.loads) / max(1, len(each.loads))
            for index, each in enumerate(self.replicas)
        }
        return AutoscalingContext(
            deployment_id=DeploymentID("Router"),
            deployment_name="Router",
            app_name="specdec",
            current_num_replicas=len(self.replicas),
            target_num_replicas=len(self.replicas),
            running_replicas=[],
            total_num_requests=0.0,
            total_queued_requests=0.0,
            aggregated_metrics={LOAD: loads},
            raw_metrics={},
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state=state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now_s,
            config=scaling,
        )
