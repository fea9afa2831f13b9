"""Curves by the costs and acceptance of a policy, under the settings in force."""

from dataclasses import replace

import pytest

from specdec.types.reports.service_curve import LEAST_RATE
from tests.specdec.speculation.policy.synthetic_service import (
    Clock,
    CostCurve,
    SyntheticService,
    auto_policy,
)

COSTS = CostCurve(weights_s=0.010, row_s=0.0002, draft_s=0.0008)


def trained(threshold=256, max_num_seqs=64):
    """Return a policy that has seen most drafts accepted, and its clock."""
    clock = Clock()
    policy = auto_policy(clock, COSTS.table(4), 4, threshold, max_num_seqs=max_num_seqs)
    SyntheticService(COSTS, (0.9,) * 4, clock, noise=0.0, stall=0.0).run(policy, 2, 3.0)
    return policy, clock


def plain(size):
    return 1 / COSTS.step_s(size, 0)


def test_drafts_give_latency_at_low_load_and_none_at_the_largest_batch():
    untrained = auto_policy(Clock(), COSTS.table(4), 4, max_num_seqs=48).service_curve
    assert untrained.num_streams == (1, 2, 4, 8, 16, 32, 48)
    curve = trained()[0].service_curve
    assert curve.stream_tokens_per_s[0] > 1.2 * untrained.stream_tokens_per_s[0]
    assert curve.stream_tokens_per_s[0] > 1.5 * plain(1)
    assert curve.stream_tokens_per_s[-1] == pytest.approx(plain(64), rel=0.05)


def test_prompts_have_the_rate_of_steps_with_their_tokens():
    rate = 2048 / COSTS.step_s(1, 0, num_rows=2048)
    assert trained()[0].service_curve.prompt_tokens_per_s == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize(
    "changes", [{"mode": "off"}, {"num_speculative_tokens": 0}, {"mode": "on"}]
)
def test_it_follows_the_settings_of_an_operator_at_once(changes):
    policy, _ = trained()
    drafting = policy.service_curve.stream_tokens_per_s
    policy.update(replace(policy.control, **changes))
    curve = policy.service_curve
    if changes.get("mode") == "on":  # four drafts, also where they cost more than they yield
        assert curve.stream_tokens_per_s[0] == drafting[0]
        assert curve.stream_tokens_per_s[-1] < 0.9 * drafting[-1]
    else:
        measured = slice(0, None, 2)  # between them the table of costs is linear
        expected = [*map(plain, curve.num_streams[measured])]
        assert curve.stream_tokens_per_s[measured] == pytest.approx(expected, rel=0.05)


def test_steps_of_a_stall_have_the_least_rate():
    costs = CostCurve(weights_s=20_000.0, row_s=0.0002, draft_s=0.0008)
    policy = auto_policy(Clock(), costs.table(4), 4, max_num_seqs=64)
    assert set(policy.service_curve.stream_tokens_per_s) == {LEAST_RATE}


def test_beyond_the_threshold_no_drafts_are_counted():
    curve = trained(threshold=5)[0].service_curve
    assert curve.num_streams == (1, 2, 4, 5, 6, 8, 16, 32, 64)
    pairs = zip(curve.num_streams, curve.stream_tokens_per_s, strict=True)
    fast = [rate > 1.2 * plain(size) for size, rate in pairs]
    assert fast == [True] * 4 + [False] * 5


def test_it_is_computed_once_a_second():
    policy, clock = trained()
    curve = policy.service_curve
    policy._is_drafter_available = lambda: False
    clock.now_s += 0.9
    assert policy.service_curve is curve
    clock.now_s += 0.2
    assert policy.service_curve.stream_tokens_per_s[0] == pytest.approx(plain(1), rel=0.05)
