"""The choice among draft workers, and moves of Routers in simulated pools."""

from dataclasses import dataclass

import pytest

from cluster.workers.shared_draft.drafter_choice import Drafter, MovePolicy, by_expected_cost
from tests.clock import Clock

STEP_S = 0.01
TARGET_S = 0.005
"""Time of a step of a target: each Router uses two thirds of a drafter that it has for itself."""


def test_a_step_waits_for_others_and_for_the_network():
    assert Drafter("a", 3, 1.0, 0.0).cost_s(STEP_S) == STEP_S
    assert Drafter("a", 3, 0.5, 0.002).cost_s(STEP_S) == pytest.approx(0.022)
    assert Drafter("a", 3, 1.0, 0.002).expected_cost_s(STEP_S) == pytest.approx(0.042)


def test_a_router_without_a_seat_prefers_few_others_then_near_ones():
    near, far, full = (
        Drafter("near", 1, 1.0, 0.0),
        Drafter("far", 1, 1.0, 0.004),
        Drafter("full", 2, 1.0, 0.0),
    )
    assert by_expected_cost([full, far, near]) == [near, far, full]
    very_far = Drafter("a", 0, 1.0, 0.015)
    assert by_expected_cost([very_far, near]) == [near, very_far], "farther than one more is slow"


def test_a_better_drafter_must_be_so_for_three_looks_in_a_row():
    policy, own, other = MovePolicy(Clock()), Drafter("a", 1, 0.5, 0.0), Drafter("b", 0, 1.0, 0.0)
    equal = Drafter("b", 0, 0.6, 0.0)  # costs 0.83 of the own one
    looks = [policy.better(own, [each], STEP_S) for each in (other, other, equal, other, other)]
    assert looks == [None] * 5
    assert policy.better(own, [other], STEP_S) == other


def test_a_router_stays_for_ten_seconds():
    clock = Clock()
    policy, own, other = MovePolicy(clock), Drafter("a", 1, 0.5, 0.0), Drafter("b", 0, 1.0, 0.0)
    policy.record_seat()
    moves = []
    for _ in range(11):
        clock.now_s += 0.99
        moves.append(policy.better(own, [other], STEP_S))
    assert moves == [None] * 10 + [other]


@dataclass
class Simulated:
    """A Router of a pool: draws drafts of STEP_S as fast as its drafter and its target allow."""

    seat: str
    policy: MovePolicy
    is_idle: bool = False
    num_moves: int = 0


class Pool:
    """Routers at drafters whose time is divided fairly. distances: round trips by drafter."""

    def __init__(self, seats, distances):
        self.clock = Clock()
        self.distances = distances
        self.routers = [Simulated(seat, MovePolicy(self.clock)) for seat in seats]
        self._moved_at_s = dict.fromkeys("abcd", float("-inf"))

    def at(self, name):
        return [each for each in self.routers if each.seat == name]

    def use(self, router):
        """Return the part of its drafter's time that a Router uses."""
        active = [each for each in self.at(router.seat) if not each.is_idle]
        wanted = STEP_S / (STEP_S + TARGET_S + self.distances[router.seat])
        return 0.0 if router.is_idle else min(wanted, 1 / len(active))

    def drafter(self, name, router):
        others = [each for each in self.at(name) if each is not router]
        uses = [self.use(each) for each in others]
        share = max(1 / (1 + sum(use > 0 for use in uses)), 1 - sum(uses))
        return Drafter(name, len(others), share, self.distances[name])

    def run(self, num_looks):
        """Let every Router look once a second; a drafter accepts one that moves every 3 s."""
        for _ in range(num_looks):
            self.clock.now_s += 1
            for router in self.routers:
                seen = {name: self.drafter(name, router) for name in self.distances}
                own = seen.pop(router.seat)
                if router.is_idle:
                    continue
                better = router.policy.better(own, seen.values(), STEP_S)
                if better and self.clock.now_s - self._moved_at_s[better.name] >= 3:
                    self._moved_at_s[better.name] = self.clock.now_s
                    router.seat, router.num_moves = better.name, router.num_moves + 1
                    router.policy.record_seat()

    @property
    def counts(self):
        return {name: len(self.at(name)) for name in self.distances}

    @property
    def num_moves(self):
        return sum(each.num_moves for each in self.routers)


def test_routers_of_one_drafter_spread_over_three_and_stay():
    pool = Pool("aaaaaa", dict.fromkeys("abc", 0.0))
    pool.run(60)
    assert pool.counts == {"a": 2, "b": 2, "c": 2}
    num_moves = pool.num_moves
    assert num_moves <= 6, "hardly more than the four that are needed"
    pool.run(1000)
    assert pool.num_moves == num_moves


@pytest.mark.parametrize("num_routers", [1, 2, 3, 5, 7])
def test_every_pool_settles(num_routers):
    pool = Pool("a" * num_routers, {"a": 0.0, "b": 0.001, "c": 0.003})
    pool.run(120)
    num_moves = pool.num_moves
    pool.run(1000)
    assert pool.num_moves == num_moves


def test_a_drafter_that_is_added_serves_within_five_seconds():
    pool = Pool("ab" * 2, dict.fromkeys("ab", 0.0))
    pool.run(30)
    assert pool.num_moves == 0
    pool.distances["c"] = 0.0
    pool.run(5)
    assert pool.counts["c"] == 1


def test_a_distant_drafter_is_used_only_where_the_near_one_is_busy():
    far = {"a": 0.0, "b": 0.004}
    alone, crowded, distant = Pool("a", far), Pool("aa", far), Pool("aa", {"a": 0.0, "b": 0.03})
    for pool in (alone, crowded, distant):
        pool.run(50)
    assert alone.counts == {"a": 1, "b": 0}
    assert crowded.counts == {"a": 1, "b": 1}
    assert distant.counts == {"a": 2, "b": 0}, "waiting for the other one takes less"


def test_a_router_moves_when_its_neighbor_becomes_busy():
    pool = Pool("aab", dict.fromkeys("ab", 0.0))
    pool.routers[1].is_idle = pool.routers[2].is_idle = True
    pool.run(50)
    assert pool.num_moves == 0
    pool.routers[1].is_idle = False
    pool.run(5)
    assert pool.counts == {"a": 1, "b": 2}
