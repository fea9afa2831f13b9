"""Memory of the seats at a pool of draft workers on one machine."""

from dataclasses import replace

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.serve.draft_pool import seat_of_plan
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.errors import InvalidValueError
from tests.cluster.workers.shared_drafts import LIMITS

DRAFT = SpeculativeConfig.of("draft_model", model="/models/small")
PLAN = replace(LIMITS, num_blocks=200)
"""Limits of a replica with a separate draft worker; a sequence has up to 40 blocks."""


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"replicas_per_draft_worker": 2}, 200),
        ({"replicas_per_draft_worker": 5}, 200),
        ({"max_draft_workers": 2}, 100),
        ({"min_draft_workers": 4, "max_draft_workers": 4}, 50),
        ({"max_draft_workers": 5}, 40),
    ],
)
def test_the_seats_of_a_replica_share_what_its_plan_has_for_drafts(settings, num_blocks):
    config = ServeConfig(**settings, ingress="serve", num_replicas=5, speculative_config=DRAFT)
    assert seat_of_plan(config, PLAN).num_blocks == num_blocks


def test_more_workers_than_there_is_memory_for_are_refused():
    settings = {"max_draft_workers": 5, "num_replicas": 5, "ingress": "serve"}
    config = ServeConfig(**settings, speculative_config=DRAFT)
    with pytest.raises(InvalidValueError, match=r"max_draft_workers is 5.*at most 4, for whose"):
        seat_of_plan(config, replace(PLAN, num_blocks=199))
