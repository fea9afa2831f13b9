"""Expert parallelism: whole experts on each rank, with the logits of a single rank."""

from functools import cache

import pytest
import torch

from specdec.config.engine import ModelOptions
from specdec.config.llm import LLMConfig
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.model_report import Precision, report_model
from specdec.engine.models.model_resolution import Models
from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import InvalidValueError, OutOfMemoryError
from tests.specdec.engines import engine_config, local_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import reference_model, save_family
from tests.specdec.models.passes import in_pass_order, load, mixed_logits, weights_of
from tests.specdec.models.sequences import Sequences, texts
from tests.specdec.processes import results, run_processes
from tests.specdec.tiny import train_tokenizer

WHOLE = ModelOptions(divides_by_expert=True)
MIXTURES = [
    *("mixtral", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v2", "deepseek-v3"),
    *("glm4-moe", "dots1", "minimax-m2"),
]
QUICK = ["qwen3-moe", "gpt-oss", "deepseek-v3"]

needs_kernels = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def ids():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 383, (40,), generator=generator).tolist() for _ in range(2)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, ids):
    """A function that writes a family once, and returns it with the logits of transformers."""

    @cache
    def save(name):
        directory = tmp_path_factory.mktemp(name)
        save_family(directory, name)
        model = reference_model(directory)
        with torch.inference_mode():
            return directory, [model(torch.tensor([each])).logits[0] for each in ids]

    return save


def passes():
    """Yield (name, ranks, kernels); make test has both kernels and each number of ranks."""
    for index, name in enumerate(MIXTURES):
        for size in (1, 2, 3):
            for kernels in ("auto", "torch"):
                is_quick = name in QUICK and size == 1 + (index + (kernels == "torch")) % 3
                yield pytest.param(name, size, kernels, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "size", "kernels"), list(passes()))
def test_logits_equal_transformers(saved, ids, name, size, kernels):
    """Five experts on two or three ranks: none of the sizes divides them."""
    directory, expected = saved(name)
    parts = run_ranks(
        size, lambda group: mixed_logits(directory, ids, group, kernels=kernels, options=WHOLE)
    )
    logits = torch.cat(parts, dim=1)
    torch.testing.assert_close(logits, in_pass_order(expected), atol=1e-4, rtol=1e-4)


def test_a_rank_reads_whole_experts_and_the_report_counts_them(saved):
    directory, _ = saved("gpt-oss")
    report = report_model(directory, Precision("float32", None, is_native=False), 3, WHOLE)
    assert [each.num_experts for each in report.ranks] == [1, 2, 2]
    for rank, memory in enumerate(report.ranks):
        group = TensorParallelGroup(rank, 3)
        model = weights_of(load(directory, group, kernels="torch", options=WHOLE))
        assert [len(layer.mlp.experts) for layer in model.layers] == [memory.num_experts] * 3
        matrices = [model.lm_head.matrix.weight, model.embed_tokens.weight]
        for layer in model.layers:
            linears = [layer.attention.qkv_proj, layer.attention.o_proj]
            for expert in layer.mlp.experts:
                assert expert.down_proj.matrix.weight.numel() == 90 * 101
                linears += [expert.gate_up_proj, expert.down_proj]
            matrices += [each.matrix.weight for each in linears]
        assert memory.weight_bytes == 4 * sum(each.numel() for each in matrices)


@needs_kernels
@pytest.mark.parametrize("size", [1, 2])
def test_a_row_does_not_depend_on_the_batch(saved, size):
    """Each rank adds in the order of its experts, and all ranks in one order."""
    directory, _ = saved("qwen3-moe")
    ours, others = texts(2, 120)

    def rows(group):
        model = load(directory, group, options=WHOLE)
        alone = Sequences(model, 4, count=2).run((0, ours, 0))[0]
        together = Sequences(model, 4, count=2)
        together.run((1, others[:70], 0))
        first = together.run((0, ours[:90], 0), (1, others[70:], 70))[0]
        second = together.run((0, ours[90:], 90))[0]
        return torch.equal(torch.cat([first, second]), alone)

    assert run_ranks(size, rows) == [True] * size


def shared_logits(rank, size, directory, address):
    """Compute logits on one of several processes that share memory."""
    from specdec.kernels.cpu import SharedMemory

    group = TensorParallelGroup(
        rank, size, SharedMemory(native_library(), rank, size, address, timeout_s=30)
    )
    model = load(directory, group, options=WHOLE)
    return Sequences(model, 4).run((0, texts(1, 100)[0], 0))[0].numpy()


@needs_kernels
@pytest.mark.slow
def test_ranks_that_share_memory_reduce_inside_the_kernels(saved, tmp_path):
    directory, _ = saved("mixtral")
    parts = results(run_processes(2, shared_logits, directory, tmp_path / "address"))
    logits = torch.cat([torch.from_numpy(part) for part in parts], dim=1)
    model = load(directory, TensorParallelGroup())
    expected = Sequences(model, 4).run((0, texts(1, 100)[0], 0))[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_tokens_are_those_of_a_single_rank(saved):
    """With drafts, chunked prefill and several sequences in a batch."""
    directory, _ = saved("gpt-oss")
    train_tokenizer(383).save_pretrained(directory)
    requests = [request("a", [5, 6, 7, 8] * 6), request("b", [21, 22] * 5)]

    def tokens(group, **how):
        engine = local_engine(directory, engine_config(3), group, **how)
        return {name: each.token_ids for name, each in run(engine, requests).items()}

    single = tokens(TensorParallelGroup())
    assert run_ranks(3, lambda group: tokens(group, options=WHOLE)) == [single] * 3


def plan(directory, options=WHOLE, available_bytes=2**33, **settings):
    config = LLMConfig(
        model=str(directory), speculative_config=None, enable_expert_parallel=True, **settings
    )
    assert config.model_options == options
    return memory_plan(
        config, Models(ModelConfig.from_directory(directory, options)), available_bytes
    )


def test_a_model_without_experts_and_more_ranks_than_experts_are_refused(saved, tiny_model_dir):
    with pytest.raises(InvalidValueError, match="enable_expert_parallel is True; it must be false"):
        plan(tiny_model_dir, max_model_len=64)
    directory, _ = saved("mixtral")
    plan(directory, tensor_parallel_size=5, max_model_len=64)
    with pytest.raises(InvalidValueError, match="at most 5, the experts of the model"):
        plan(directory, tensor_parallel_size=6, max_model_len=64)
    with pytest.raises(InvalidValueError, match="at most 5, the experts of the model"):
        report_model(directory, Precision("float32", None, is_native=False), 6, WHOLE)


def test_the_plan_of_gpus_is_that_of_the_rank_with_most_experts(saved, monkeypatch):
    """Five experts on three ranks: one has two of them, more than a third."""
    monkeypatch.setattr("specdec.config.llm.resolved_device", lambda device: "cuda")
    monkeypatch.setattr("specdec.engine.memory.gpu_memory.gpu_workspace_bytes", lambda *_, **__: 0)
    directory, _ = saved("mixtral")
    config = ModelConfig.from_directory(directory)
    by_units, by_expert = config.largest_weight_share(3), config.divided_by_expert()
    assert (by_units, by_expert.largest_weight_share(3)) == (pytest.approx(1 / 3, rel=0.02), 0.4)
    limits = {"tensor_parallel_size": 3, "max_model_len": 16, "dtype": "float32"}
    least = int(0.4 * config.weight_bytes("float32")) + 16 * config.kv_bytes_per_token("float32")
    plan(directory, available_bytes=least, **limits)
    with pytest.raises(OutOfMemoryError):
        plan(directory, available_bytes=int(0.37 * config.weight_bytes("float32")), **limits)
