"""Memory of the seats at a pool of draft workers on one machine."""

from dataclasses import replace

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.workers.shared_draft.seat_memory import seat_of_plan, seat_of_worker
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.models.model_resolution import Models
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import InvalidValueError, OutOfMemoryError
from tests.cluster.workers.shared_drafts import LIMITS

GIB = 2**30
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


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_seats_of_a_worker_fit_into_the_memory_of_its_gpu(tiny_model_dir, is_shared):
    """Plans do not divide it among replicas, as they do the memory of a machine."""
    model = ModelConfig.from_directory(tiny_model_dir)
    model = replace(model, max_position_embeddings=2**20)  # of more KV than there is memory
    settings = {"replicas_per_draft_worker": 5, "num_replicas": 5, "ingress": "serve"}
    config = ServeConfig(
        **settings, speculative_config=DRAFT, device="cuda", dtype="float32", max_num_seqs=256
    )
    limits, num_bytes = seat_of_worker(config, Models(model, model), 16 * GIB, is_shared=is_shared)
    block_bytes = limits.block_size * model.kv_bytes_per_token("float32", 1)
    assert 4 * GIB < 5 * limits.num_blocks * block_bytes < 16 * GIB
    assert num_bytes is not None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replicas_per_draft_worker": 5}, r"its 5 seats is .* lower replicas_per_draft_worker,"),
        ({"max_draft_workers": 2}, r"5 seats \(max_draft_workers is 2\) .* lower num_replicas,"),
    ],
)
def test_seats_that_are_too_small_are_refused_with_what_makes_them_larger(
    tiny_model_dir, settings, text
):
    model = ModelConfig.from_directory(tiny_model_dir)
    many = {"num_replicas": 5, "ingress": "serve", "device": "cuda", "dtype": "float32"}
    config = ServeConfig(**settings, **many, speculative_config=DRAFT, kv_cache_memory_gib=1.0)
    models, num_bytes = Models(model, model), GIB
    with pytest.raises(
        OutOfMemoryError, match=rf"worker has 1\.0 GiB; the part of each of .*{text}"
    ):
        seat_of_worker(config, models, num_bytes, is_shared=True)
    with pytest.raises(OutOfMemoryError, match="raise tensor_parallel_size or kv_cache_memory_gib"):
        seat_of_worker(replace(config, kv_cache_memory_gib=1e-6), models, num_bytes, is_shared=True)


def test_more_workers_than_there_is_memory_for_are_refused():
    settings = {"max_draft_workers": 5, "num_replicas": 5, "ingress": "serve"}
    config = ServeConfig(**settings, speculative_config=DRAFT)
    with pytest.raises(InvalidValueError, match=r"max_draft_workers is 5.*at most 4, for whose"):
        seat_of_plan(config, replace(PLAN, num_blocks=199))
