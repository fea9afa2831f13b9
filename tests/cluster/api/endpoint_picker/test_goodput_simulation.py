"""Requests within the objective on sixteen simulated replicas, by several rules of choice."""

from functools import partial
from statistics import mean, quantiles
from typing import NamedTuple

import pytest

from cluster.config.objective import Objective
from tests.cluster.api.endpoint_picker.simulation import (
    ByPool,
    QueueAndPrefix,
    RoundRobin,
    ServePrefix,
    Trace,
    route,
)

SMOOTH, BURSTS, SPIKES = (1.0,), (0.4, 0.7, 1.0, 1.9), (0.2, 0.2, 0.2, 3.0)
FLEETS = {"slow": ("slow",) * 16, "mixed": ("fast", "slow") * 8, "fast": ("fast",) * 16}
LOADS = (
    ("slow", 66, Objective(1, 0.03), SMOOTH),
    ("slow", 70, Objective(2, 0.04), BURSTS),
    ("slow", 60, Objective(4, 0.06), SPIKES),
    ("mixed", 170, Objective(2, 0.04), SMOOTH),
    ("mixed", 170, Objective(1, 0.03), BURSTS),
    ("mixed", 210, Objective(4, 0.06), BURSTS),
    ("mixed", 140, Objective(2, 0.04), SPIKES),
    ("fast", 270, Objective(2, 0.04), BURSTS),
    ("fast", 200, Objective(2, 0.04), SPIKES),
)
"""Fleets, requests per second, objectives, and factors of the rate by turns."""

OVERLOAD = ("slow", 70, Objective(2, 0.04), BURSTS)
"""The load of 60 s."""

KV_LOADS = (
    ("mixed", 80, Objective(2, 0.04), SMOOTH, 20_000),
    ("mixed", 100, Objective(2, 0.04), BURSTS, 20_000),
    ("mixed", 60, Objective(2, 0.04), BURSTS, 10_000),
)
"""The last field is the capacity of a KV cache in tokens: it fills before the batch does."""

HEAVY_SEEDS, SEEDS = (1, 2, 3), (7, 8, 9)
"""Those of the former have more requests. The weights of the score were chosen on seed 0, that of
the tail also on seed 4 of the overload; the rates earlier, on seeds 0 and 1."""


class Outcome(NamedTuple):
    """Requests within the objective, their mean over traces; and the wait for the first token."""

    within: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_max_s: float


def outcome(make, load, seeds, seconds):
    """Return the mean share of the traces, and latencies of all their requests."""
    fleet, rate, objective, bursts, *cache = load
    traces = [
        route(make, FLEETS[fleet], Trace(rate, seconds, seed, bursts), *cache) for seed in seeds
    ]
    within = mean(mean(each.meets(objective) for each in trace) for trace in traces)
    waits_s = [each.first_at_s - each.at_s for trace in traces for each in trace]
    cuts = quantiles(waits_s, n=100)
    return Outcome(within, cuts[49], cuts[98], max(waits_s))


def rules(objective):
    return {
        "turns": RoundRobin,
        "queue, prefix": QueueAndPrefix,
        "with sent": partial(QueueAndPrefix, counts_sent=True),
        "Serve prefix": ServePrefix,
        "tokens": partial(ByPool, objective=None),
        "goodput": partial(ByPool, objective=objective),
    }


def outcomes(load, seeds, seconds=15):
    """Return the outcome of each rule, and print it."""
    found = {name: outcome(make, load, seeds, seconds) for name, make in rules(load[2]).items()}
    rows = (" ".join([name, *(f"{value:.3f}" for value in row)]) for name, row in found.items())
    print(*load[:2], *load[2], len(load[3]), seconds, *rows, sep=" | ")
    return found


def shares(loads, seeds):
    """Return the mean share of each rule, and print the gains of goodput."""
    found = [outcomes(load, seeds) for load in loads]
    within = {name: mean(each[name].within for each in found) for name in found[0]}
    print(
        seeds,
        *(f"{name} {each:.3f} {within['goodput'] / each:.3f}" for name, each in within.items()),
    )
    return within


def test_more_requests_are_within_the_objective_than_by_turns():
    load = ("mixed", 170, Objective(1, 0.03), SMOOTH)
    turns, scores, goodput = (
        outcome(rules(load[2])[name], load, (1,), 5).within
        for name in ("turns", "queue, prefix", "goodput")
    )
    assert goodput >= 1.25 * turns
    assert goodput >= 1.1 * scores


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [HEAVY_SEEDS, SEEDS])
def test_over_all_loads_more_requests_are_within_the_objective(seeds):
    within = shares(LOADS, seeds)
    assert within["goodput"] >= 1.25 * within["turns"]
    assert within["goodput"] >= 1.03 * within["queue, prefix"]
    assert within["goodput"] >= max(within.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [HEAVY_SEEDS, SEEDS])
def test_full_kv_caches_cost_little_against_the_default(seeds):
    within = shares(KV_LOADS, seeds)
    assert within["goodput"] >= 1.25 * within["turns"]
    assert within["goodput"] >= 0.97 * within["tokens"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_a_long_overload_more_requests_are_within_the_objective():
    """The late ones wait longer: that is its cost."""
    found = outcomes(OVERLOAD, SEEDS, seconds=60)
    goodput = found["goodput"]
    assert goodput.within >= 1.25 * found["turns"].within
    assert goodput.within >= max(each.within for each in found.values())
    assert goodput.ttft_p99_s <= 2.5 * found["queue, prefix"].ttft_p99_s
