"""The autoscaling policy alone, and within Serve's wrapper that applies the delays."""

import pytest
from ray.serve._private.common import DeploymentID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from cluster.config.serve_config import ServeConfig
from cluster.serve.autoscaling import LOAD, NEEDED, autoscaling_config, num_replicas

CONFIG = ServeConfig(
    ingress="serve",
    min_replicas=1,
    max_replicas=8,
    target_requests_per_replica=10.0,
    upscale_delay_s=5.0,
    downscale_delay_s=60.0,
)


def context(loads, current=None, *, now_s=0.0, state=None, ongoing=0.0, needed=()):
    """Return a context in which the replicas have reported `loads`."""
    current = len(loads) if current is None else current
    return AutoscalingContext(
        deployment_id=DeploymentID("Router"),
        deployment_name="Router",
        app_name="specdec",
        current_num_replicas=current,
        target_num_replicas=current,
        running_replicas=[],
        total_num_requests=ongoing,
        total_queued_requests=0.0,
        aggregated_metrics={LOAD: dict(enumerate(loads))} if loads else {},
        raw_metrics={
            NEEDED: {name: as_series(values) for name, values in enumerate(needed)},
        },
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now_s,
        config=autoscaling_config(CONFIG),
    )


def as_series(values):
    return [TimeStampedValue(at_s, value) for at_s, value in enumerate(values)]


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([0.0], 1),
        ([10.0], 1),
        ([10.1], 2),
        ([45.0], 5),
        ([10.0, 10.0], 2),
        ([6.0, 6.0], 2),
        ([4.1, 4.0], 2),
        ([4.0, 4.0], 1),
        ([0.0, 0.0, 0.0], 1),
        ([30.0, 0.0], 3),
        ([5.0, 5.0, 5.0, 5.0], 3),
    ],
)
def test_the_number_of_replicas_for_a_load(loads, expected):
    assert num_replicas(context(loads)) == (expected, {})


@pytest.mark.parametrize("load", [x * 2.5 for x in range(33)])
def test_a_constant_load_does_not_oscillate(load):
    """From every number of replicas, a second decision changes nothing."""
    for current in range(1, 9):
        changed = num_replicas(context([load / current] * current))[0]
        assert num_replicas(context([load / changed] * changed))[0] == changed


def test_no_replica_is_removed_before_all_have_reported():
    assert num_replicas(context([1.0], 2))[0] == 2
    assert num_replicas(context([], 3))[0] == 3
    assert num_replicas(context([25.0], 2))[0] == 3


@pytest.mark.parametrize(
    ("needed", "expected"),
    [([[2.0, 4.0]], 4), ([[4.0, 2.0], [3.0]], 3), ([[1.0], [1.0]], 1), ([[]], 5), ([], 5)],
)
def test_the_latest_number_for_the_objective_counts_in_place_of_the_load(needed, expected):
    assert num_replicas(context([25.0, 25.0], needed=needed))[0] == expected


def test_no_replica_is_removed_for_the_objective_before_all_have_reported():
    assert num_replicas(context([1.0], 2, needed=[[1.0]]))[0] == 2
    assert num_replicas(context([1.0, 1.0], 2, needed=[[1.0], [1.0]]))[0] == 1
    for needed in ([[1.0]], [[1.0], []]):
        assert num_replicas(context([1.0, 1.0], 2, needed=needed))[0] == 2, "one lacks the number"


def test_ongoing_requests_of_serve_are_ignored():
    assert num_replicas(context([2.0], ongoing=1000.0))[0] == 1


@pytest.fixture
def decide(monkeypatch):
    """Return Serve's decision at a given time of the wall clock."""
    policy, state = _apply_autoscaling_config(num_replicas), {}

    def decide(loads, now_s, needed=()):
        nonlocal state
        monkeypatch.setattr("ray.serve.autoscaling_policy.time.time", lambda: now_s)
        number, state = policy(context(loads, now_s=now_s, state=state, needed=needed))
        return number

    return decide


def test_replicas_are_added_and_removed_after_the_delays(decide):
    assert [decide([25.0], now_s) for now_s in (0.0, 4.0, 5.0)] == [1, 1, 3]
    low = [1.0, 1.0, 1.0]
    assert [decide(low, now_s) for now_s in (10.0, 69.0, 70.0)] == [3, 3, 1]


def test_the_last_number_for_the_objective_is_held_while_it_is_unknown(decide):
    """The load wants five replicas: after a restart of the ControlPlane it decides later."""
    busy = [25.0, 25.0]
    assert decide(busy, 0.0, needed=[[2.0]]) == 2
    assert [decide(busy, now_s) for now_s in (1.0, 30.0, 59.0)] == [2, 2, 2]
    assert [decide(busy, now_s) for now_s in (60.0, 64.0, 65.0)] == [2, 2, 5]


def test_a_short_rise_adds_no_replica(decide):
    assert [decide([25.0], 0.0), decide([5.0], 3.0), decide([25.0], 6.0)] == [1, 1, 1]


def test_a_fixed_number_of_replicas_is_no_autoscaling():
    assert autoscaling_config(ServeConfig()) is None


def test_the_configuration_of_serve():
    config = autoscaling_config(CONFIG)
    assert (config.min_replicas, config.max_replicas) == (1, 8)
    assert config.policy.get_policy()(context([45.0])) == (5, {})
