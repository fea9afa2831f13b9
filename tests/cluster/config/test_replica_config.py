# Modules: cluster.config.draft_workers, cluster.config.replicas
"""Settings of replicas, and of the draft workers that they share."""

import pytest

from cluster.config.objective import Objective
from cluster.config.serve_config import ServeConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.errors import InvalidValueError


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_replicas": 2}, "ingress"),
        ({"max_replicas": 1}, "ingress"),
        ({"ingress": "serve", "min_replicas": 2}, "min_replicas"),
        ({"ingress": "serve", "min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"ingress": "serve", "num_replicas": 2, "max_replicas": 3}, "num_replicas"),
    ],
)
def test_replicas_are_checked_together(values, field):
    with pytest.raises(InvalidValueError) as error:
        ServeConfig(**values)
    assert error.value.field == field


@pytest.mark.parametrize(
    "speculation",
    [None, {"policy": "threshold"}, {"num_speculative_tokens_per_batch_size": [[1, 64, 3]]}],
)
def test_an_objective_needs_the_policy_that_measures_tokens_per_second(speculation):
    given = {"slo": "ttft:2000 tpot:40"}
    assert ServeConfig.from_mapping(given).objective == Objective(2.0, 0.04)
    with pytest.raises(InvalidValueError, match=r"slo is 'ttft:2000 .* the policy goodput: others"):
        ServeConfig.from_mapping({**given, "speculative_config": speculation})


def test_minimum_and_maximum_number_of_replicas():
    fixed = ServeConfig(ingress="serve", num_replicas=3)
    scaled = ServeConfig(ingress="serve", min_replicas=2, max_replicas=4, drain_timeout_s=0)
    numbers = [
        (each.fewest_replicas, each.most_replicas) for each in (ServeConfig(), fixed, scaled)
    ]
    assert numbers == [(1, 1), (3, 3), (2, 4)]


DRAFT = SpeculativeConfig.of("draft_model", model="/models/small")
SEVERAL = {"ingress": "serve", "num_replicas": 5}


@pytest.mark.parametrize(
    ("settings", "num_workers"),
    [
        ({}, 0),
        ({"replicas_per_draft_worker": 2}, 3),
        ({"replicas_per_draft_worker": 5}, 1),
        ({"replicas_per_draft_worker": 4, "num_replicas": 1, "max_replicas": 9}, 3),
        ({"max_draft_workers": 3}, 3),
        ({"min_draft_workers": 7, "max_draft_workers": 7}, 7),
    ],
)
def test_replicas_share_draft_workers_at_the_highest_load(settings, num_workers):
    config = ServeConfig(**{**SEVERAL, **settings, "speculative_config": DRAFT})
    assert config.num_shared_draft_workers == num_workers
    assert config.shares_draft_workers is (num_workers > 0)
    assert config.num_spare_ranks == (num_workers == 0)


def test_a_worker_of_a_pool_has_a_seat_for_every_replica():
    scaled = {"ingress": "serve", "min_replicas": 2, "max_replicas": 9}
    pool = {"min_draft_workers": 2, "max_draft_workers": 3}
    config = ServeConfig(**scaled, **pool, speculative_config=DRAFT)
    assert config.num_draft_seats == 9
    assert (config.fewest_shared_draft_workers, config.num_shared_draft_workers) == (2, 3)
    fixed = ServeConfig(**SEVERAL, replicas_per_draft_worker=2, speculative_config=DRAFT)
    assert fixed.num_draft_seats == 2
    assert (fixed.fewest_shared_draft_workers, fixed.num_shared_draft_workers) == (3, 3)


@pytest.mark.parametrize(
    ("speculation", "settings", "message"),
    [
        (None, {"max_draft_workers": 2}, "max_draft_workers is 2.*left out unless speculative"),
        (DRAFT, {"max_draft_workers": 2, "min_draft_workers": 3}, "at least 3"),
        (DRAFT, {"min_draft_workers": 3}, "min_draft_workers is 3.*left out unless max_draft"),
        (DRAFT, {"target_draft_utilization": 0.5}, "left out unless max_draft_workers is given"),
        (
            DRAFT,
            {"max_draft_workers": 2, "replicas_per_draft_worker": 2},
            "replicas_per_draft_worker is 2.*a seat for every replica",
        ),
        (
            DRAFT,
            {"min_draft_workers": 2, "max_draft_workers": 2, "target_draft_utilization": 0.5},
            "target_draft_utilization is 0.5.*their number is fixed",
        ),
        (DRAFT, {"max_draft_workers": 2, "target_draft_utilization": 0}, "above 0"),
        (DRAFT, {"max_draft_workers": 2, "target_draft_utilization": 1}, "below 1"),
        (DRAFT, {"max_draft_workers": 6}, r"max_draft_workers is 6.*number of replicas \(5\)"),
    ],
)
def test_settings_of_a_pool_that_exclude_each_other_are_refused(speculation, settings, message):
    with pytest.raises(InvalidValueError, match=message):
        ServeConfig(**SEVERAL, speculative_config=speculation, **settings)


@pytest.mark.parametrize(
    ("speculation", "settings", "limit"),
    [
        (SpeculativeConfig.of("ngram"), {}, "1 unless speculative_config has the method"),
        (
            SpeculativeConfig.of("draft_model", draft_tensor_parallel_size=2),
            {},
            "its ranks would have to agree",
        ),
        (
            SpeculativeConfig.of("draft_model", share_gpu=True),
            {"device": "cuda"},
            "a separate device",
        ),
        (DRAFT, {"enable_lora": True}, "numbers the adapters"),
        (DRAFT, {"replicas_per_draft_worker": 6}, r"at most the number of replicas \(5\)"),
        (DRAFT, {"replicas_per_draft_worker": 65}, "from 1 to 64"),
    ],
)
def test_shared_draft_workers_are_refused_with_the_reason(speculation, settings, limit):
    values = {**SEVERAL, "replicas_per_draft_worker": 2, "speculative_config": speculation}
    with pytest.raises(InvalidValueError, match=rf"replicas_per_draft_worker.*{limit}"):
        ServeConfig(**{**values, **settings})
