"""Memory of a draft worker that several engines share."""

from dataclasses import replace

import pytest

from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.memory.gpu_workspace import gpu_workspace_bytes
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.memory.shared_draft_memory import seat_bytes, seat_limits
from specdec.engine.models.model_resolution import Models
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.stored_weights import StoredWeights
from specdec.types.errors import OutOfMemoryError

GIB = 2**30


@pytest.fixture
def models(tiny_model_dir):
    model = ModelConfig.from_directory(tiny_model_dir)
    return Models(model, model)


@pytest.fixture(params=["cpu", "cuda"])
def config(request):
    drafting = SpeculativeConfig.of("draft_model")
    return LLMConfig(
        model="tiny",
        device=request.param,
        dtype="float32",
        speculative_config=drafting,
        max_num_seqs=4,
    )


def test_engines_share_the_weights_and_divide_the_rest(config, models):
    alone, shared = (seat_bytes(config, models, 8 * GIB, count) for count in (1, 4))
    assert alone == 8 * GIB
    weights = (4 * shared - alone) // 3  # shared = weights + (alone - weights) / 4
    assert weights >= models.draft.weight_bytes(config.resolved_dtype)
    assert shared < 8 * GIB


def test_weights_that_stay_in_few_bits_are_shared_as_such(config, models, monkeypatch):
    """Else each engine would count the memory that they save as its own."""
    monkeypatch.setattr(LLMConfig, "keeps_stored_weights", True)
    packed = replace(models.draft, stored_weights=StoredWeights(4.5))
    saved = packed.weight_bytes("float32") - packed.weight_bytes("float32", keeps_stored=True)
    dense, shared = (
        seat_bytes(config, Models(models.target, each), 8 * GIB, 4)
        for each in (models.draft, packed)
    )
    if config.device == "cuda":  # whose workspace has the largest matrix dequantized
        of_dense, of_packed = (
            gpu_workspace_bytes(config, each, drafts=True) for each in (models.draft, packed)
        )
        saved -= of_packed - of_dense
    assert saved > 0
    assert dense - shared == pytest.approx(saved * 3 / 4, abs=1)


def test_all_engines_leave_room_for_the_graphs_of_their_sequences(models):
    drafting = SpeculativeConfig.of("draft_model")
    config = LLMConfig(device="cuda", dtype="float32", speculative_config=drafting, max_num_seqs=16)
    weights = models.draft.weight_bytes("float32")
    of_seat, of_worker = (
        weights + gpu_workspace_bytes(config, models.draft, drafts=True, num_engines=count)
        for count in (1, 4)
    )
    assert of_worker > of_seat
    assert seat_bytes(config, models, 8 * GIB, 4) == of_seat + (8 * GIB - of_worker) // 4


def test_the_parts_of_all_engines_fit_and_hold_what_one_plan_uses(config, models):
    num_bytes = seat_bytes(config, models, 8 * GIB, 2)
    limits = seat_limits(config, models, num_bytes)
    plan = memory_plan(config, models, 8 * GIB, num_bytes)
    assert limits.num_blocks >= plan.draft.num_blocks
    block_bytes = config.block_size * models.draft.kv_bytes_per_token(config.resolved_dtype, 1)
    assert 2 * limits.num_blocks * block_bytes < 8 * GIB


def test_a_worker_without_room_for_a_sequence_of_each_engine_is_refused(config, models):
    with pytest.raises(OutOfMemoryError):
        seat_limits(config, models, seat_bytes(config, models, GIB // 4, 64))
