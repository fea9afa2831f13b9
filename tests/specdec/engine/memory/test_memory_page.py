# Modules: specdec.engine.memory.host_memory, specdec.engine.memory.gpu_workspace
"""The figures of docs/memory.md, from the functions that plan memory."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.memory.gpu_workspace import gpu_workspace_bytes
from specdec.engine.memory.host_memory import PROCESS_BYTES, _target_bytes_without_kv
from specdec.engine.memory.kv_pools import draft_pool, target_pool
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.model_report import Precision, report_model
from specdec.engine.models.model_resolution import Models
from specdec.models.config.model_config import ModelConfig
from specdec.speculation.proposers import proposer_memory
from specdec.types.drafters import MAX_LOADED_VERSIONS
from specdec.types.errors import OutOfMemoryError

PAGE = Path("docs/memory.md").read_text()
GIB, MIB = 2**30, 2**20
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
LLAMA |= {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "eos_token_id": 128001}
SIZES_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
SIZES_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
ON_CPU = LLMConfig(
    dtype="bfloat16",
    quantization="int8",
    max_model_len=8192,
    max_num_seqs=8,
    speculative_config=SpeculativeConfig.of("suffix"),
)
ON_GPU = LLMConfig(
    device="cuda",
    dtype="bfloat16",
    quantization="int8",
    max_model_len=8192,
    max_num_seqs=64,
    speculative_config=SpeculativeConfig.of("draft_model", model="small", share_gpu=True),
)


def model_dir(directory, sizes):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA | sizes))
    return directory


@pytest.fixture
def directory_8b(tmp_path):
    return model_dir(tmp_path / "8b", SIZES_8B)


@pytest.fixture
def models(directory_8b, tmp_path):
    small = model_dir(tmp_path / "1b", SIZES_1B | {"tie_word_embeddings": True})
    return Models(ModelConfig.from_directory(directory_8b), ModelConfig.from_directory(small))


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text):
    """Return the cells of each row of the tables by the first cell."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in cells}


def gib(num_bytes):
    return f"{num_bytes / GIB:.2f}"


def num_tokens(config, models, free_bytes):
    engine = memory_plan(config, models, free_bytes).engine
    return engine.num_blocks * engine.block_size


def test_the_lines_of_models_show(directory_8b):
    precision = Precision("bfloat16", "int8", is_native=True)
    for number, rank in enumerate(report_model(directory_8b, precision, 2).ranks):
        weights, kv = rank.weight_bytes / MIB, rank.kv_bytes_per_token / 2**10
        assert f"rank {number}            {weights:.1f} MiB of weights, {kv:.1f} KiB" in PAGE


def test_the_constants_of_the_formula():
    found = rows(section("The formula"))
    suffix, ngram, lookahead = (
        proposer_memory(SpeculativeConfig.of(each)) for each in ("suffix", "ngram", "lookahead")
    )
    lookups = found["lookups, on a CPU"][0]
    assert f"{suffix.fixed_bytes // MIB} MiB, and {suffix.bytes_per_token} bytes" in lookups
    assert f"`ngram`: {ngram.bytes_per_token} bytes" in lookups
    assert f"`lookahead`: {lookahead.bytes_per_sequence / MIB:.1f} MiB" in lookups
    for row in ("processes, on a CPU", "draft model"):
        assert f"{PROCESS_BYTES // MIB} MiB for each" in found[row][0]
    assert MAX_LOADED_VERSIONS == 3
    assert "three times its weights" in found["draft head"][0]


def test_the_example_on_a_cpu(models):
    models = Models(models.target)
    text = section("Example: 8B on a CPU")
    found, pool = rows(text), target_pool(ON_CPU, models)
    suffix = proposer_memory(ON_CPU.speculative_config)
    without_kv = _target_bytes_without_kv(ON_CPU, models, in_process=False)
    one = pool.blocks_of_longest * pool.block_bytes
    processes = without_kv - pool.weight_bytes - suffix.fixed_bytes
    assert found["weights"] == [gib(pool.weight_bytes)]
    assert found["one rank, Router, ControlPlane"] == [gib(processes)]
    assert found["`suffix`"] == [gib(suffix.fixed_bytes)]
    assert found["sum without KV"] == [gib(without_kv)]
    assert found["KV of one sequence of 8,192 tokens"] == [gib(one)]
    assert found["KV of eight"] == [gib(8 * one)]
    full = dataclasses.replace(ON_CPU, kv_cache_memory_gib=8.0)
    assert f"{num_tokens(ON_CPU, models, 24 * GIB):,} tokens" in text
    for config, wanted in ((ON_CPU, "starts from"), (full, "which needs")):
        [figure] = re.findall(rf"{wanted} (\d+\.\d+) GiB", text)
        assert num_tokens(config, models, int(float(figure) * GIB)) >= 8192
        with pytest.raises(OutOfMemoryError):
            memory_plan(config, models, int((float(figure) - 0.01) * GIB))


def test_the_example_on_a_gpu(models):
    title = "Example: a target and its draft model on one GPU of 24 GiB"
    text = section(title)
    found, free = rows(text), int(ON_GPU.gpu_memory_utilization * 24 * GIB)
    target, draft = target_pool(ON_GPU, models), draft_pool(ON_GPU, models)
    pools = (target, draft)
    spaces = [gpu_workspace_bytes(ON_GPU, each.model, drafts=each is draft) for each in pools]
    longest = [gib(each.blocks_of_longest * each.block_bytes) for each in pools]
    assert found["weights"] == [gib(each.weight_bytes) for each in pools]
    assert found["workspace"] == [gib(each) for each in spaces]
    assert found["KV of one sequence of 8,192 tokens"] == longest
    left = free - sum(spaces) - sum(each.weight_bytes for each in pools)
    assert f"0.9 of the GPU are {gib(free)} GiB" in text
    assert f"{gib(left)} GiB are left" in text
    tokens = num_tokens(ON_GPU, models, free)
    assert f"{tokens:,} tokens each" in text
    assert f"64 of {tokens // 64}" in text
    assert tokens // 8192 == 4
    alone = dataclasses.replace(ON_GPU, speculative_config=None)
    assert f"would have {num_tokens(alone, Models(models.target), free):,}" in text
