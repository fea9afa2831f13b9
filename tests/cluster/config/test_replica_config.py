"""Settings of replicas, and of the draft workers that they share."""

import pytest

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
    ],
)
def test_replicas_share_draft_workers_at_the_highest_load(settings, num_workers):
    config = ServeConfig(**{**SEVERAL, **settings, "speculative_config": DRAFT})
    assert config.num_shared_draft_workers == num_workers
    assert config.shares_draft_workers is (num_workers > 0)
    assert config.num_spare_ranks == (num_workers == 0)


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
