# Modules: specdec.engine.models.model_limits, specdec.models.config.native_limits
"""Settings that hybrids, and models run by transformers' code, lack are refused by their names."""

import json
import shutil
from dataclasses import replace

import pytest

from specdec.config.engine import ModelOptions, snapshot_interval
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculative_keys import read_speculation
from specdec.engine.memory.gpu_memory import divide_gpus
from specdec.engine.memory.gpu_workspace import gpu_workspace_bytes
from specdec.engine.memory.kv_pools import draft_pool, target_pool
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.memory.weight_memory import draft_state_bytes
from specdec.engine.models.model_limits import check_model_limits
from specdec.engine.models.model_report import Fit, Precision, report_model
from specdec.engine.models.model_resolution import Models, resolve_models
from specdec.llm.arguments import read_arguments
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.models.families import save_family
from tests.specdec.models.foreign import save_foreign
from tests.specdec.packing import awq, write_packed
from tests.specdec.tiny import tiny_llama_dir, train_tokenizer

TORCH = {"kernels": "torch"}
TOO_MANY_RANKS = {"draft_tensor_parallel_size": 4}


@pytest.fixture(scope="module")
def gpt2_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gpt2")
    save_foreign(directory, "gpt2")
    train_tokenizer(383).save_pretrained(directory)
    return directory


def plan(directory, **settings):
    drafting = read_speculation(settings.pop("speculative_config", "none"))
    config = LLMConfig(model=str(directory), speculative_config=drafting, **settings)
    return memory_plan(config, resolve_models(config, print).configs(), 2**33, in_process=True)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        (
            {"tensor_parallel_size": 2},
            "must be 1: transformers has no tensor-parallel plan for gpt2",
        ),
        ({"quantization": "int8"}, "must be none: the model runs by transformers' code"),
        ({"enable_lora": True}, "must be false: the model runs by transformers' code"),
        ({"kernels": "native"}, "must be auto or torch: the model runs by transformers' code"),
    ],
)
def test_settings_of_the_own_decoder_are_refused(gpt2_dir, settings, limit):
    with pytest.raises(InvalidValueError, match=next(iter(settings))) as refused:
        plan(gpt2_dir, **settings)
    assert limit in str(refused.value)


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hybrid")
    save_family(directory, "qwen3-next")
    train_tokenizer(383).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"device": "cuda", "enable_lora": True}, "must be false: recurrent layers have adapters"),
        ({"kernels": "triton", "enable_lora": True}, "must be false: recurrent layers have"),
        ({"tensor_parallel_size": 4}, "must be at most 3, the units of a recurrent layer"),
    ],
)
def test_settings_that_recurrent_layers_lack_are_refused(hybrid_dir, settings, limit):
    with pytest.raises(InvalidValueError, match=[*settings][-1]) as refused:
        plan(hybrid_dir, **settings)
    assert limit in str(refused.value)


def test_recurrent_layers_are_planned_for_a_gpu(hybrid_dir):
    found = plan(hybrid_dir, device="cuda", dtype="bfloat16")
    assert found.engine.state_bytes > 0
    tree = {"method": "ngram", "num_speculative_tokens": 4, "num_draft_tree_tokens": 8}
    with pytest.raises(InvalidValueError, match=r"draft_tree_tokens is 8; it must be 0: recurrent"):
        plan(hybrid_dir, device="cuda", dtype="bfloat16", speculative_config=tree)


def test_a_gpu_keeps_the_inputs_of_guesses(tmp_path):
    """They are twice the hidden states that torch's kernels keep for Jamba."""
    save_family(tmp_path, "jamba")
    train_tokenizer(383).save_pretrained(tmp_path)
    chain = {"method": "ngram", "num_speculative_tokens": 4}
    settings = {"device": "cuda", "dtype": "float32", "max_num_seqs": 10}
    triton, without, torch = (
        plan(tmp_path, **settings, **each).state_bytes
        for each in ({"speculative_config": chain}, {}, {"speculative_config": chain, **TORCH})
    )
    assert triton - without == 2 * (torch - without) > 0


def test_states_are_reserved_on_a_gpu_beside_the_kv_cache(hybrid_dir):
    """Also those of a draft model."""
    chain = read_speculation({"method": "ngram", "num_speculative_tokens": 4})
    config = LLMConfig(
        model=str(hybrid_dir),
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=200,
        speculative_config=chain,
    )
    pool = target_pool(config, resolve_models(config, print).configs())
    states = 200 * pool.model.recurrent.state_bytes("bfloat16", 1, num_guesses=4)
    assert states > 100 * pool.block_bytes
    workspace = gpu_workspace_bytes(config, pool.model, drafts=False)
    available = pool.weight_bytes + states + workspace + 100 * pool.block_bytes
    assert divide_gpus(config, pool, None, available, None).target == 100
    plain = replace(pool.model, recurrent=None)
    mixed = (200 * 4 + config.max_num_batched_tokens) * state_inputs(pool.model) * 4
    assert workspace - gpu_workspace_bytes(config, plain, drafts=False) > mixed
    drafting = read_speculation({"model": str(hybrid_dir), "num_speculative_tokens": 4})
    config = replace(config, speculative_config=drafting)
    models = resolve_models(config, print).configs()
    assert draft_pool(config, models).extra_bytes == draft_state_bytes(config, models) > 0


def state_inputs(model):
    return model.recurrent.kind.state(range(model.recurrent.kind.num_units)).num_inputs


@pytest.mark.parametrize(
    ("family", "settings", "limit"),
    [
        ("llama4", {"kernels": "native"}, "chunks of 7 tokens (max_model_len 256) have no native"),
        ("deepseek-v3.2", {"kernels": "native"}, "choices of 11 tokens (max_model_len 256) have"),
        ("gemma4", {"kernels": "native"}, "layers of different shapes have no native kernel"),
        ("gemma4", {"device": "cuda"}, "must be cpu: layers of different shapes"),
        ("gemma4", {"enable_lora": True}, "must be false: no adapter updates the projections"),
    ],
)
def test_settings_that_families_by_torch_lack_are_refused(tmp_path, family, settings, limit):
    save_family(tmp_path, family)
    train_tokenizer(383).save_pretrained(tmp_path)
    with pytest.raises(InvalidValueError, match=next(iter(settings))) as refused:
        plan(tmp_path, **settings)
    assert limit in str(refused.value)


def test_layers_of_different_shapes_have_draft_heads(tmp_path):
    save_family(tmp_path, "gemma4")
    speculation = SpeculativeConfig.of(method="eagle3", model="given")
    config = LLMConfig(model=str(tmp_path), speculative_config=speculation)
    check_model_limits(config, Models(ModelConfig.from_directory(tmp_path), head=None))


@pytest.mark.parametrize("family", ["llama4", "deepseek-v3.2"])
def test_contexts_that_all_queries_see_have_native_kernels(tmp_path, family):
    save_family(tmp_path, family)
    train_tokenizer(383).save_pretrained(tmp_path)
    assert plan(tmp_path, kernels="native", max_model_len=7) is not None


def test_a_hybrid_has_states_and_snapshots_in_its_memory(hybrid_dir):
    tree = {"method": "ngram", "num_speculative_tokens": 4, "num_draft_tree_tokens": 8}
    found = plan(hybrid_dir, speculative_config=tree, max_num_seqs=10)
    assert (found.engine.keeps_guesses, found.engine.max_row_guesses) == (True, 8)
    recurrent = ModelConfig.from_directory(hybrid_dir).recurrent
    assert found.state_bytes == 10 * recurrent.state_bytes("float32", 1, num_guesses=8)
    assert f"states of {found.state_bytes / 2**20:.1f} MiB" in found.describe()
    gib = {"kv_cache_memory_gib": 0.01, "max_model_len": 64}
    cached, plain = (
        plan(hybrid_dir, enable_prefix_caching=is_on, **gib).engine for is_on in (True, False)
    )
    block_bytes = 16 * ModelConfig.from_directory(hybrid_dir).kv_bytes_per_token("float32")
    assert cached.state_bytes == plain.state_bytes == recurrent.state_bytes("float32")
    assert cached.snapshot_interval == snapshot_interval(cached.state_bytes, block_bytes)
    assert plain.num_snapshots == 0 < cached.num_snapshots
    own = cached.num_blocks * block_bytes + cached.num_snapshots * cached.state_bytes
    assert 0.98 < own / (plain.num_blocks * block_bytes) <= 1
    snapshots = found.engine.num_snapshots * found.engine.state_bytes / 2**20
    assert f"{found.engine.num_snapshots} snapshots of {snapshots:.1f} MiB" in found.describe()
    report = report_model(hybrid_dir, Precision("float32", None, is_native=True), 2)
    states = [each.state_bytes + 8 * each.guess_bytes for each in report.ranks]
    assert sum(states) * 10 == found.state_bytes
    assert {each.method: each.fit for each in report.methods}["mtp"] is Fit.NO


def test_a_hybrid_drafts_without_what_it_lacks(hybrid_dir, tiny_model_dir):
    drafting = {"method": "draft_model", "model": str(hybrid_dir), "num_speculative_tokens": 3}
    settings = {"speculative_config": drafting, "max_model_len": 64, "max_num_seqs": 2}
    found = plan(tiny_model_dir, **settings)
    assert (found.draft.enable_prefix_caching, found.draft.max_draft_tokens) == (False, 3)
    assert found.engine.enable_prefix_caching
    assert found.engine.speculation.draft_model.async_drafting == "off"
    with pytest.raises(InvalidValueError, match="at most 3, the units of a recurrent layer"):
        plan(tiny_model_dir, **settings | {"speculative_config": {**drafting, **TOO_MANY_RANKS}})
    ahead = {**drafting, "async_drafting": "outcomes"}
    with pytest.raises(InvalidValueError, match=r"async_drafting .*auto or off"):
        plan(tiny_model_dir, **settings | {"speculative_config": ahead})


def test_a_hybrid_drafts_for_no_other_tokenizer(hybrid_dir, tiny_model_dir, tmp_path):
    shutil.copytree(hybrid_dir, tmp_path, dirs_exist_ok=True)
    train_tokenizer(300).save_pretrained(tmp_path)
    drafting = read_speculation({"method": "draft_model", "model": str(tmp_path)})
    config = LLMConfig(model=str(tiny_model_dir), speculative_config=drafting)
    with pytest.raises(InvalidValueError, match="a model with the target's tokenizer"):
        resolve_models(config, print)


def test_a_draft_model_is_limited_in_the_same_way(gpt2_dir, tiny_model_dir):
    drafting = {"method": "draft_model", "model": str(gpt2_dir)}
    settings = {"speculative_config": {**drafting, "quantization": "int8"}, "max_model_len": 64}
    with pytest.raises(InvalidValueError, match=r"speculative_config\.quantization"):
        plan(tiny_model_dir, **settings)
    assert plan(tiny_model_dir, **settings | {"speculative_config": drafting}).draft is not None


@pytest.mark.parametrize("family", ["deepseek-v3", "lfm2"])
def test_latent_attention_and_recurrent_layers_take_adapters(tmp_path, family):
    save_family(tmp_path, family)
    train_tokenizer(383).save_pretrained(tmp_path)
    assert plan(tmp_path, enable_lora=True).engine.adapters is not None


def test_the_setting_selects_the_implementation(gpt2_dir, tiny_model_dir):
    plan(gpt2_dir)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not supported"):
        plan(gpt2_dir, model_impl="specdec")
    plan(tiny_model_dir, tensor_parallel_size=2)
    plan(tiny_model_dir, tensor_parallel_size=3, model_impl="transformers")
    with pytest.raises(InvalidValueError, match="it must be a divisor of 9, the heads"):
        plan(tiny_model_dir, tensor_parallel_size=2, model_impl="transformers")


def test_whole_experts_need_a_plan_of_transformers(gpt2_dir, tmp_path):
    with pytest.raises(InvalidValueError, match=r"false: .* no expert-parallel plan for gpt2"):
        plan(gpt2_dir, enable_expert_parallel=True)
    save_foreign(tmp_path, "qwen2-moe")
    train_tokenizer(383).save_pretrained(tmp_path)
    plan(tmp_path, enable_expert_parallel=True, tensor_parallel_size=3)


def test_plans_that_ranks_cannot_follow_are_refused(tmp_path):
    for name, size, limit in (
        ("granite-moe", 3, "must be 1: transformers' plan divides no attention"),
        ("youtu", 3, "must be 1: latent attention is not divided"),
        ("phi", 2, "must be a divisor of 3, the KV heads of the model"),
    ):
        directory = tmp_path / name
        directory.mkdir()
        save_foreign(directory, name)
        train_tokenizer(383).save_pretrained(directory)
        with pytest.raises(InvalidValueError, match=f"tensor_parallel_size is {size}; it {limit}"):
            plan(directory, tensor_parallel_size=size, model_impl="transformers")


def test_copies_of_a_tied_embedding_are_counted(tiny_model_dir):
    precision = Precision("float32", None, is_native=False)
    options = ModelOptions("transformers")
    one, three = (report_model(tiny_model_dir, precision, size, options).ranks for size in (1, 3))
    table = 383 * 144 * 4
    assert len(three) == 3
    assert three[0].weight_bytes == (one[0].weight_bytes + 3 * table) // 3
    assert 3 * three[0].kv_bytes_per_token == one[0].kv_bytes_per_token


@pytest.fixture(scope="module")
def awq_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("awq")
    source = tiny_llama_dir(root / "source", intermediate=208, layers=1)
    config = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}
    write_packed(source, root / "packed", root / "plain", config, awq)
    return root / "packed"


@pytest.mark.parametrize("name", ["awq", "awq_marlin", None])
def test_the_name_of_a_format_is_that_of_the_files(awq_dir, name):
    arguments = {"quantization": name, "max_model_len": 64, "speculative_config": None}
    config = read_arguments(str(awq_dir), arguments).config
    assert config.quantization_method is None
    memory_plan(config, resolve_models(config, print).configs(), 2**33, in_process=True)


@pytest.mark.parametrize("name", ["modelopt", "fp8"])
def test_fp8_of_modelopt_has_two_names(tiny_model_dir, tmp_path, name):
    for path in tiny_model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(InvalidValueError, match=f"quantization is '{name}'; it must be none"):
        plan(tmp_path, quantization=name, max_model_len=64)
    described = tmp_path / "hf_quant_config.json"
    described.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    unnamed = plan(tmp_path, max_model_len=64)
    assert plan(tmp_path, quantization=name, max_model_len=64) == unnamed


def test_the_name_of_another_format_is_refused(awq_dir, tiny_model_dir):
    with pytest.raises(InvalidValueError, match="the model has weights quantized by awq; a format"):
        plan(awq_dir, quantization="gptq", max_model_len=64)
    with pytest.raises(
        InvalidValueError, match="quantization is 'fp8'; it must be none, int8, w8a8"
    ):
        plan(tiny_model_dir, quantization="fp8", max_model_len=64)
    plan(awq_dir, quantization="int8", max_model_len=64)  # of the dequantized weights


def test_names_of_other_engines_mean_the_own_decoder():
    for name, expected in [("vllm", "specdec"), ("transformers", "transformers")]:
        arguments = read_arguments("smollm2-135m-instruct", {"model_impl": name})
        assert arguments.config.model_impl == expected


def test_the_report_states_what_runs_the_model(gpt2_dir):
    precision = Precision("float32", None, is_native=False)
    report = report_model(gpt2_dir, precision, 1)
    assert report.differences == "layers of transformers' modelling code"
    assert report.ranks[0].kv_bytes_per_token == 2 * 3 * 96 * 4
    fits = {each.method: each.fit for each in report.methods}
    assert fits["ngram"] is Fit.READY
    assert fits["draft_model"] is Fit.NEEDS_FILES
    assert fits["eagle3"] is Fit.NO
    with pytest.raises(InvalidValueError, match="tensor_parallel_size"):
        report_model(gpt2_dir, precision, 2)
