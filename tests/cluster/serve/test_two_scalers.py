"""The speculation policy and the autoscaler together, in one simulation.

They do not interfere: the goodput policy stops drafting when plain decoding yields more tokens per
second, which never lowers a replica's capacity; the autoscaler counts open requests, and the token
rate relative to the capacity of a replica (`cluster.replica.report`). Counting open requests alone,
it would add and remove a replica every two and a half minutes at a constant load of 1.2 or 1.9
replicas.
"""

from itertools import pairwise

import pytest

from cluster.config.serve_config import ServeConfig
from tests.cluster.fleet_simulation import SimulatedFleet
from tests.specdec.speculation.policy.synthetic_service import CostCurve

SMALL = CostCurve(weights_s=0.020, row_s=0.001, draft_s=0.002)
GOOD = (0.85, 0.8, 0.75, 0.7, 0.7)
CONFIG = ServeConfig(
    ingress="serve",
    max_replicas=5,
    target_requests_per_replica=32.0,
    upscale_delay_s=10.0,
    downscale_delay_s=120.0,
    max_num_seqs=64,
    speculative_config=None,
)
CAPACITY = 9.0
"""Approximate maximum of requests per second of one replica."""


@pytest.fixture
def simulate(monkeypatch):
    def set_wall_clock(now_s):
        monkeypatch.setattr("ray.serve.autoscaling_policy.time.time", lambda: now_s)

    def simulate(rate, seconds):
        fleet = SimulatedFleet(rate, SMALL, GOOD, CONFIG, set_wall_clock)
        fleet.run(seconds)
        return fleet

    return simulate


def test_speculation_stops_before_a_replica_is_added(simulate):
    fleet = simulate(lambda second: second / 40, 500)
    added_at_s, count = fleet.changes[0]
    assert count == 2
    before = [each for each in fleet.history if each.at_s < added_at_s]
    assert before[60].num_chosen >= 4, "drafts are long at low load"
    stopped = [each.at_s for each in before if each.num_chosen < 1 and each.num_open > 0]
    assert stopped, "a replica was added while speculation was on"
    assert added_at_s - stopped[0] >= CONFIG.upscale_delay_s
    after = [each for each in fleet.history if added_at_s + 20 < each.at_s < added_at_s + 60]
    assert max(each.num_chosen for each in after) >= 1, "drafting does not resume"


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.5, marks=pytest.mark.slow),
        pytest.param(0.9, marks=pytest.mark.slow),
        1.2,
        pytest.param(1.9, marks=pytest.mark.slow),
    ],
)
def test_a_steady_load_settles(simulate, share):
    fleet = simulate(lambda second: share * CAPACITY, 600)
    late = [at_s for at_s, _ in fleet.changes if at_s > 300]
    assert len(late) <= 1, "the number of replicas oscillates"
    assert fleet.history[-1].num_open < CONFIG.target_requests_per_replica * 5


@pytest.mark.slow
def test_an_oscillating_load_respects_the_downscale_delay(simulate):
    """The load alternates between 0.3 and 1.5 replicas every 40 s.

    The draft length follows immediately; a replica is removed after the delay at the earliest.
    """
    fleet = simulate(lambda second: CAPACITY * (0.3 if second // 40 % 2 else 1.5), 520)
    sizes = [(0.0, 1), *fleet.changes]
    removals = [at_s for (_, before), (at_s, after) in pairwise(sizes) if after < before]
    assert all(b - a >= CONFIG.downscale_delay_s for a, b in pairwise([0.0, *removals]))
    chosen = [each.num_chosen for each in fleet.history]
    assert min(chosen) < 1.5 < 3 <= max(chosen)
