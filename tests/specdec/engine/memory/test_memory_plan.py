# Modules: specdec.engine.memory.host_memory, specdec.engine.memory.kv_pools
"""Division of memory between two models, on one host and on described GPUs."""

import dataclasses
from types import SimpleNamespace

import pytest

from specdec.config.engine import EngineConfig
from specdec.config.gpu.graph_sizes import most_padding_tokens
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.memory.host_memory import draft_bytes_without_kv
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.memory.weight_memory import extra_weight_bytes
from specdec.engine.models.model_limits import draft_adapter_limits
from specdec.engine.models.model_resolution import Models
from specdec.models.config.extra_weights import adapter_bytes
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.speculation.proposers import proposer_memory
from specdec.types.errors import InvalidValueError, OutOfMemoryError
from tests.specdec.heads import NUM_HEADS, fitted_medusa_dir

GIB = 2**30


@pytest.fixture
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


@pytest.fixture
def drafting():
    speculation = SpeculativeConfig.of(
        "draft_model", draft_tensor_parallel_size=2, max_model_len=100
    )
    return LLMConfig(speculative_config=speculation)


def engine_config(config: LLMConfig, model: ModelConfig, available: int) -> EngineConfig:
    return memory_plan(config, Models(model), available).engine


def test_the_kv_pool_takes_a_share_of_free_memory(model):
    sized = [
        engine_config(LLMConfig(max_num_seqs=256), model, available).num_blocks
        for available in (GIB, 2 * GIB)
    ]
    assert 0 < sized[0] < sized[1]


def test_the_kv_pool_is_no_larger_than_sequences_can_fill(model):
    config = engine_config(LLMConfig(max_num_seqs=2, max_model_len=64), model, 1000 * GIB)
    assert config.num_blocks == 2 * 64 // 16


def test_a_configured_pool_size_is_used(model):
    config = LLMConfig(kv_cache_memory_gib=0.25)
    block_bytes = 16 * 2 * 2 * 3 * 16 * 4
    assert engine_config(config, model, 8 * GIB).num_blocks == GIB // 4 // block_bytes


@pytest.mark.parametrize(
    ("changes", "available", "message"),
    [
        ({}, GIB // 8, "GiB are free"),
        (
            {"kv_cache_memory_gib": 50.0, "speculative_config": None},
            8 * GIB,
            "need 50.8 GiB, and 8.0 GiB are free",
        ),
        ({"kv_cache_memory_gib": 0.0001}, 8 * GIB, "have 0.1 MiB; one sequence .* needs 0.4"),
    ],
)
def test_too_little_memory_raises_an_error(model, changes, available, message):
    with pytest.raises(OutOfMemoryError, match=message):
        engine_config(LLMConfig(**changes), model, available)


def test_a_context_beyond_the_models_is_refused(model):
    with pytest.raises(InvalidValueError, match="max_model_len is 513; it must be from 2 to 512"):
        engine_config(LLMConfig(max_model_len=513), model, 8 * GIB)


@pytest.mark.parametrize("tied", [True, False])
def test_quantized_weights_are_counted_as_such(model, tied):
    model = dataclasses.replace(model, tie_word_embeddings=tied)
    attention, mlp, head = (9 + 3 + 3 + 9) * 16 * 144, 3 * 144 * 200, 383 * 144
    norms = (2 * 2 + 1) * 144
    matrices = 2 * (attention + mlp) + head
    assert model.weight_bytes("float32", "int8") == matrices + 4 * (head + norms)
    full = matrices + norms + (0 if tied else head)
    assert model.weight_bytes("bfloat16") == 2 * full


def test_quantized_weights_leave_more_blocks(model):
    config = LLMConfig(max_num_seqs=4096, max_num_batched_tokens=4096)
    quantized = engine_config(dataclasses.replace(config, quantization="int8"), model, GIB)
    assert quantized.num_blocks > engine_config(config, model, GIB).num_blocks


def test_wider_weights_leave_fewer_blocks(model):
    config = LLMConfig(max_num_seqs=4096, max_num_batched_tokens=4096)
    narrow = engine_config(dataclasses.replace(config, dtype="bfloat16"), model, GIB)
    assert narrow.num_blocks > engine_config(config, model, GIB).num_blocks


def kv_bytes(model, limits, num_ranks=1):
    per_token = model.kv_bytes_per_token("float32", num_ranks)
    return limits.num_blocks * limits.block_size * per_token


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_8_bit_kv_of_both_models_has_twice_the_blocks_of_16_bits(model, device):
    drafts = SpeculativeConfig.of("draft_model", model="draft")
    config = LLMConfig(
        device=device,
        kernels="torch",
        dtype="bfloat16",
        max_num_seqs=4096,
        max_num_batched_tokens=4096,
        speculative_config=drafts,
        kv_cache_memory_gib=0.25,
    )
    plans = [
        memory_plan(
            dataclasses.replace(config, kv_cache_dtype=kind), Models(model, model), 40 * GIB
        )
        for kind in ("auto", "fp8", "fp8_e5m2")
    ]
    counts = [(plan.engine.num_blocks, plan.draft.num_blocks) for plan in plans]
    assert counts[1] == counts[2]
    for wide, narrow in zip(*counts[:2], strict=True):
        assert abs(narrow - 2 * wide) <= 1
    assert plans[1].engine.kv_cache_dtype == plans[1].draft.kv_cache_dtype == "fp8"


def test_target_and_draft_share_the_memory_block_for_block(model, drafting):
    """While max_num_seqs sequences can fill that many blocks of the draft."""
    drafting = dataclasses.replace(drafting, kv_cache_memory_gib=0.01)
    alone = memory_plan(drafting, Models(model), 4 * GIB)
    both = memory_plan(drafting, Models(model, model), 4 * GIB)
    assert alone.draft is None
    assert both.draft.num_blocks == both.engine.num_blocks < alone.engine.num_blocks
    assert both.draft.max_model_len == 100


class WithSpare(LLMConfig):
    """Configuration of a service with one process beside its draft ranks."""

    num_spare_ranks = 1


def test_a_draft_model_in_the_process_of_the_target_drafts_nothing_ahead(model, drafting):
    ahead = SpeculativeConfig.of("draft_model", async_drafting="outcomes")
    config = dataclasses.replace(drafting, speculative_config=ahead)
    both = Models(model, model)
    assert memory_plan(config, both, 4 * GIB).engine.speculation == ahead
    alone = memory_plan(config, both, 4 * GIB, in_process=True).engine.speculation
    assert alone == SpeculativeConfig.of("draft_model")


def test_a_spare_of_a_draft_rank_leaves_less_memory(model):
    settings = {"max_num_seqs": 4096, "max_num_batched_tokens": 4096}
    settings["speculative_config"] = SpeculativeConfig.of("draft_model")
    both = Models(model, model)
    less = memory_plan(WithSpare(**settings), both, 3 * GIB)
    assert less == memory_plan(LLMConfig(**settings), both, 3 * GIB - 350 * 2**20)
    assert (
        less.engine.num_blocks < memory_plan(LLMConfig(**settings), both, 3 * GIB).engine.num_blocks
    )


@pytest.mark.parametrize("gib", [None, 0.05])
def test_a_draft_with_a_short_context_leaves_its_memory_to_the_target(model, gib):
    def plan(max_model_len):
        speculation = SpeculativeConfig.of("draft_model", max_model_len=max_model_len)
        config = LLMConfig(
            max_num_seqs=256, kv_cache_memory_gib=gib, speculative_config=speculation
        )
        return memory_plan(config, Models(model, model), 1.5 * GIB)

    whole, short = plan(None), plan(32)
    assert whole.draft.num_blocks == whole.engine.num_blocks
    assert short.draft.num_blocks == 256 * 2
    total = [kv_bytes(model, each.engine) + kv_bytes(model, each.draft) for each in (whole, short)]
    assert short.engine.num_blocks > 1.5 * whole.engine.num_blocks
    assert total[1] == pytest.approx(total[0], rel=0.01)
    assert gib is None or max(total) <= gib * GIB


SPECULATIONS = [
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 16},
    {"method": "suffix"},
    {"method": "lookahead"},
    {"method": "draft_model"},
    {"method": "draft_model", "max_model_len": 40, "first": "ngram", "fallback": "suffix"},
    {"method": "draft_model", "model": "./other", "draft_tensor_parallel_size": 2},
]


@pytest.mark.parametrize("speculation", SPECULATIONS, ids=str)
@pytest.mark.parametrize("available", [1.6 * GIB, 2.5 * GIB, 200 * GIB])
def test_models_and_proposers_fit_on_one_host(model, speculation, available):
    speculation = SpeculativeConfig.of(**speculation)
    config = LLMConfig(max_num_seqs=512, max_num_batched_tokens=512, speculative_config=speculation)
    draft = model if speculation.method == "draft_model" else None
    plan = memory_plan(config, Models(model, draft), int(available))
    memory, num_slots = proposer_memory(speculation), plan.engine.num_blocks * 16
    taken = kv_bytes(model, plan.engine) + model.weight_bytes("float32")
    taken += memory.fixed_bytes + 512 * memory.bytes_per_sequence
    taken += num_slots * memory.bytes_per_token
    if draft is not None:
        num_ranks = speculation.drafter.draft_tensor_parallel_size
        taken += kv_bytes(draft, plan.draft, num_ranks) + draft.weight_bytes("float32")
        assert 1 <= plan.draft.num_blocks <= 512 * -(-plan.draft.max_model_len // 16)
    assert taken < available
    assert plan.engine.num_blocks >= 512 // 16


def test_adapters_of_both_models_are_counted(model):
    """A draft model with transformers' code takes none, nor one with recurrent layers on a GPU."""
    speculation = SpeculativeConfig.of("draft_model")
    config = LLMConfig(
        speculative_config=speculation, enable_lora=True, max_loras=2, kv_cache_memory_gib=None
    )
    plan = memory_plan(config, Models(model, model), 4 * GIB)
    assert plan.draft.adapters == plan.engine.adapters is not None
    without = memory_plan(
        dataclasses.replace(config, enable_lora=False), Models(model, model), 4 * GIB
    )
    assert without.draft.adapters is None
    foreign = dataclasses.replace(model, transformers=object())
    assert draft_adapter_limits(config, foreign) is None
    hybrid = dataclasses.replace(model, recurrent=object())
    on_gpu = dataclasses.replace(config, device="cuda")
    assert draft_adapter_limits(config, hybrid) == config.adapter_limits
    assert draft_adapter_limits(on_gpu, hybrid) is None
    size = adapter_bytes(model, 16, "float32")
    both, alone = (
        draft_bytes_without_kv(each, Models(model, model), in_process=False)
        for each in (config, dataclasses.replace(config, enable_lora=False))
    )
    assert both - alone == config.adapter_limits.max_loaded * size


def test_adapters_of_a_head_are_counted_for_all_its_versions(model, tiny_model_dir, tmp_path):
    head = fitted_medusa_dir(tiny_model_dir, tmp_path, [list(range(3, 20))])
    models = Models(model, None, HeadConfig.from_directory(head, model))
    config = LLMConfig(speculative_config=SpeculativeConfig.of("medusa", model="m"))
    adapted = dataclasses.replace(config, enable_lora=True)
    of_head = (models.head.max_loaded_versions + 1) * NUM_HEADS * 16 * 2 * model.hidden_size * 4
    added = extra_weight_bytes(adapted, models) - extra_weight_bytes(config, models)
    each = added / adapted.adapter_limits.max_loaded
    assert each - of_head == adapter_bytes(model, 16, "float32")


def test_the_confidence_threshold_is_part_of_the_draft_limits(model):
    speculation = SpeculativeConfig.of("draft_model", draft_confidence_threshold=0.4)
    config = LLMConfig(speculative_config=speculation)
    plan = memory_plan(config, Models(model, model), 4 * GIB)
    assert plan.draft.confidence_threshold == 0.4


def test_the_window_is_part_of_the_draft_limits(model):
    config = LLMConfig(speculative_config=SpeculativeConfig.of("draft_model", draft_window=64))
    assert memory_plan(config, Models(model, model), 4 * GIB).draft.draft_window == 64


def test_parallel_drafting_needs_a_model_that_was_trained_for_it(model):
    config = LLMConfig(
        speculative_config=SpeculativeConfig.of("draft_model", parallel_drafting=True)
    )
    with pytest.raises(InvalidValueError, match="the draft model has no pard_token"):
        memory_plan(config, Models(model, model), 4 * GIB)
    plan = memory_plan(config, Models(model, dataclasses.replace(model, mask_token_id=3)), 4 * GIB)
    assert plan.draft.parallel_drafting
    assert plan.draft.draft_window is None


def test_memory_of_lookups_is_reserved(model):
    def num_blocks(**keys):
        speculation = SpeculativeConfig.of(**keys)
        config = LLMConfig(
            max_num_seqs=4096, max_num_batched_tokens=4096, speculative_config=speculation
        )
        return engine_config(config, model, GIB).num_blocks

    uncached = num_blocks(method="suffix", suffix_decoding_max_cached_requests=0)
    assert num_blocks(method="suffix") < uncached
    lengths = [{}, {"prompt_lookup_max": 8, "prompt_lookup_min": 2}, {"prompt_lookup_max": 16}]
    by_ngrams = [num_blocks(method="ngram", **each) for each in lengths]
    assert by_ngrams[0] > by_ngrams[1] > by_ngrams[2]
    pooled = [num_blocks(method="lookahead", lookahead_pool_size=size) for size in (10, 200)]
    assert pooled[1] < pooled[0]


def test_async_scheduling_in_one_process_is_for_gpus(model):
    """On a CPU nothing runs while the engine schedules."""
    for device, runs_ahead in (("cpu", False), ("cuda", True)):
        config = LLMConfig(model="tiny", device=device, dtype="float32", speculative_config=None)
        plan = memory_plan(config, Models(model), 16 * GIB, in_process=True)
        assert plan.engine.async_scheduling == runs_ahead


def test_a_gpu_pads_steps_by_less_than_launches_cost(model):
    for device, most in (("cpu", 0), ("cuda", most_padding_tokens(model.hidden_size))):
        config = LLMConfig(model="tiny", device=device, dtype="float32", speculative_config=None)
        assert memory_plan(config, Models(model), 16 * GIB).engine.most_padding_tokens == most


def test_pools_on_separate_nodes_are_independent(model, drafting):
    drafting = dataclasses.replace(drafting, max_num_seqs=256)
    alone = memory_plan(drafting, Models(model), 2 * GIB)
    apart = memory_plan(drafting, Models(model, model), 2 * GIB, draft_bytes=4 * GIB)
    together = memory_plan(drafting, Models(model, model), 2 * GIB)
    assert apart.engine.num_blocks == alone.engine.num_blocks > together.engine.num_blocks
    assert apart.draft.num_blocks == min(alone.engine.num_blocks, 256 * 7)


def test_a_small_draft_node_bounds_only_the_draft_pool(model, drafting):
    processes = 2 * 350 * 2**20
    room = processes + model.weight_bytes("float32") + 2**20
    plan = memory_plan(drafting, Models(model, model), 4 * GIB, draft_bytes=room)
    assert 0 < kv_bytes(model, plan.draft, 2) <= 2**20
    assert plan.draft.num_blocks < plan.engine.num_blocks
    with pytest.raises(OutOfMemoryError, match=r"the node of the draft model has 0\.6 GiB"):
        memory_plan(drafting, Models(model, model), 4 * GIB, draft_bytes=int(0.6 * GIB))


def test_a_configured_size_includes_both_nodes(model, drafting):
    config = dataclasses.replace(drafting, kv_cache_memory_gib=0.01)
    plan = memory_plan(config, Models(model, model), 4 * GIB, draft_bytes=4 * GIB)
    assert plan == memory_plan(config, Models(model, model), 4 * GIB)


@dataclasses.dataclass(frozen=True)
class Head:
    """The sizes of a draft head's checkpoint."""

    num_kv_layers: int
    max_loaded_versions: int = 3
    shape = SimpleNamespace(whole_model=None)

    def kv_bytes_per_token(self, dtype, size):
        return 1000 * self.num_kv_layers * size

    def slot_size(self, device):
        return {"cpu": 100}[device]

    def weight_bytes(self, dtype, quantization):
        return GIB if quantization is None else GIB // 4


def with_head(**changes):
    speculation = SpeculativeConfig.of("medusa", model="head", **changes)
    return LLMConfig(speculative_config=speculation, kv_cache_memory_gib=0.25)


def test_the_weights_of_three_versions_of_a_head_are_counted(model):
    with pytest.raises(OutOfMemoryError, match=r"3\.9 GiB are free"):
        memory_plan(with_head(), Models(model, None, Head(0)), int(3.9 * GIB))
    memory_plan(with_head(), Models(model, None, Head(0)), int(4.2 * GIB))
    memory_plan(with_head(quantization="int8"), Models(model, None, Head(0)), int(1.95 * GIB))


def test_the_kv_and_features_of_a_head_are_part_of_a_block(model):
    def num_blocks(head):
        return memory_plan(with_head(), Models(model, None, head), 5 * GIB).engine.num_blocks

    block_bytes = 16 * 2 * 2 * 3 * 16 * 4
    assert num_blocks(Head(0)) == GIB // 4 // block_bytes, "without attention there is neither"
    assert num_blocks(Head(1)) == GIB // 4 // (block_bytes + 16 * (1000 + 400))


@pytest.mark.parametrize(
    ("changes", "available", "message"),
    [
        ({}, 8, r"a target needs 19\.\d GiB .* as float32 .*: set quantization int8 \(4\.8 GiB\)$"),
        ({}, 16, r"set dtype bfloat16 \(9\.\d GiB\), or set quantization int8"),
        ({"kv_cache_memory_gib": 2.0}, 2, "no precision fits; choose a smaller model"),
        ({"dtype": "bfloat16"}, 9, r"as bfloat16 .*: set quantization int8 \(4\.8 GiB\)$"),
    ],
)
def test_weights_that_do_not_fit_are_named_with_what_would(model, changes, available, message):
    large = dataclasses.replace(model, intermediate_size=6_000_000)
    with pytest.raises(OutOfMemoryError, match=message):
        engine_config(LLMConfig(speculative_config=None, **changes), large, available * GIB)


def test_the_advice_for_a_context_without_a_configured_cache(model):
    long = dataclasses.replace(model, max_position_embeddings=2**24)
    with pytest.raises(OutOfMemoryError, match=r"lower max_model_len$"):
        engine_config(LLMConfig(speculative_config=None), long, 8 * GIB)


def test_a_plan_is_described_in_one_line(model):
    plan = memory_plan(LLMConfig(max_num_seqs=2, max_model_len=64), Models(model), 1000 * GIB)
    assert plan.describe() == "KV of 8 blocks of 16 tokens, 2 sequences of at most 64 tokens"
