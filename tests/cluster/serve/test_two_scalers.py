"""Speculation follows the load, and so does the number of replicas: in one simulation, both.

The two cannot fight, since they judge different things: goodput gives up drafts where plain steps
yield more tokens a second, which never lowers what a replica can do; the autoscaler counts requests
that are open, whatever they draft, and tokens against what a replica could make of them at best
(`cluster.replica.report`). By open requests alone, a steady load of 1.2 or 1.9 replicas added and
gave up one for ever, every two and a half minutes.
"""

from itertools import pairwise

import pytest

from benchmarks.synthetic_service import CostCurve
from cluster.config.serve_config import ServeConfig
from tests.cluster.fleet_simulation import SimulatedFleet

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
ONE_REPLICA_CAN = 9.0
"""Requests a second, at most and about."""


@pytest.fixture
def simulate(monkeypatch):
    def set_wall_clock(now_s):
        monkeypatch.setattr("ray.serve.autoscaling_policy.time.time", lambda: now_s)

    def simulate(rate, seconds):
        fleet = SimulatedFleet(rate, SMALL, GOOD, CONFIG, set_wall_clock)
        fleet.run(seconds)
        return fleet

    return simulate


def test_speculation_is_shed_before_a_replica_is_added(simulate):
    fleet = simulate(lambda second: second / 40, 500)
    added_at_s, count = fleet.changes[0]
    assert count == 2
    before = [each for each in fleet.history if each.at_s < added_at_s]
    assert before[60].num_chosen >= 4, "with little load there are long drafts"
    shed = [each.at_s for each in before if each.num_chosen < 1 and each.num_open > 0]
    assert shed, "none was added while there was something to shed"
    assert added_at_s - shed[0] >= CONFIG.upscale_delay_s
    after = [each for each in fleet.history if added_at_s + 20 < each.at_s < added_at_s + 60]
    assert max(each.num_chosen for each in after) >= 1, "where there is room again, drafts return"


@pytest.mark.parametrize("share", [0.5, 0.9, 1.2, 1.9])
def test_a_steady_load_settles(simulate, share):
    fleet = simulate(lambda second: share * ONE_REPLICA_CAN, 600)
    late = [at_s for at_s, _ in fleet.changes if at_s > 300]
    assert len(late) <= 1, "replicas come and go"
    assert fleet.history[-1].num_open < CONFIG.target_requests_per_replica * 5


def test_a_load_that_swings_moves_each_at_its_own_pace(simulate):
    """Between a third of a replica and one and a half, every forty seconds.

    Drafts follow at once; a replica is given up after its delay at the earliest.
    """
    fleet = simulate(lambda second: ONE_REPLICA_CAN * (0.3 if second // 40 % 2 else 1.5), 800)
    sizes = [(0.0, 1), *fleet.changes]
    given_up = [at_s for (_, before), (at_s, after) in pairwise(sizes) if after < before]
    assert all(b - a >= CONFIG.downscale_delay_s for a, b in pairwise([0.0, *given_up]))
    chosen = [each.num_chosen for each in fleet.history]
    assert min(chosen) < 1.5 < 3 <= max(chosen)
