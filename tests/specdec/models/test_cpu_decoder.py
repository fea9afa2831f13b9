# Modules: specdec.kernels.cpu.decoder, specdec.models.native_weights
"""Native forward pass: close to torch, and equal bits in every batch."""

import json
import shutil
from itertools import cycle, product

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.quantization import CPU_QUANTIZATION_METHODS
from specdec.kernels.cpu import MatrixFormat, native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.cpu_decoder import NativeDecoder
from specdec.models.llama import CausalDecoder
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.sequences import NUM_TOKENS, Sequences, load, rank_logits, texts
from tests.specdec.processes import results, run_processes
from tests.specdec.threads import num_threads
from tests.specdec.tiny import tiny_llama_dir

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")

FAMILIES = ["llama-biases", "mistral-window", "qwen3", "wide"]
FAMILIES += [  # together they have every trait
    pytest.param(name, marks=pytest.mark.slow)
    for name in (
        *("granite", "smollm3", "olmo3", "phi3", "gemma2", "starcoder2", "cohere"),
        *("mixtral", "qwen3-moe", "olmoe", "gpt-oss"),
        *("deepseek-v2", "deepseek-v2-groups", "deepseek-v3"),
        *("glm4-moe", "dots1", "minimax-m2"),
        *("apertus", "arcee", "ministral3", "mistral4", "hunyuan-moe", "ernie4.5-moe"),
        "llama4-one-chunk",
    )
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def save(directory, name):
    """Write a tiny model with a long context."""
    if name == "wide":
        tiny_llama_dir(directory, heads=6, kv_heads=1, head_dim=80, max_positions=1024)
        return
    save_family(directory, name)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": 1024}
    if config.get("sliding_window"):
        config["sliding_window"] = 300
    rope = config["rope_parameters"]
    if "llama_4_scaling_beta" in rope:  # as published: a larger one enlarges rounding errors
        config["rope_parameters"] = {**rope, "llama_4_scaling_beta": 0.1}
    path.write_text(json.dumps(config))


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    save(directory, request.param)
    return directory


@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_logits_equal_torch(directory, block_size):
    (text,) = texts(1)
    found = Sequences(load(directory, block_size), block_size).run((0, text, 0))[0]
    torch_model = load(directory, block_size, kernels="torch")
    assert isinstance(torch_model, CausalDecoder)
    expected = Sequences(torch_model, block_size).run((0, text, 0))[0]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("stored", "format_"),
    [(torch.bfloat16, MatrixFormat.SHORT_FLOAT32), (torch.float16, MatrixFormat.FLOAT16)],
)
def test_16_bit_checkpoint_is_stored_in_16_bits_with_equal_logits(
    directory, tmp_path, stored, format_
):
    (text,) = texts(1, 60)
    logits = []
    for dtype, expected in ((stored, format_), (torch.float32, MatrixFormat.FLOAT32)):
        copy = tmp_path / str(dtype)
        shutil.copytree(directory, copy)
        weights = load_file(copy / "model.safetensors")
        weights = {name: each.to(stored).to(dtype) for name, each in weights.items()}
        save_file(weights, copy / "model.safetensors")
        model = load(copy, 16)
        assert formats_of(model.torch_decoder, stored) == {expected}
        assert table_dtype(model.torch_decoder) in {None, dtype}
        logits += Sequences(model, 16).run((0, text, 0))
    assert torch.equal(*logits)


def formats_of(decoder, stored):
    """Return the formats of matrices; bfloat16 needs an even number of inputs."""
    linears = []
    for layer in decoder.layers:
        linears += [layer.attention.qkv_proj, layer.attention.o_proj]
        linears += [each for each in (getattr(layer.attention, "query_up", None),) if each]
        for mlp in mlps_of(layer.mlp):
            linears += [mlp.gate_up_proj, mlp.down_proj]
    matrices = [each.matrix.native for each in (*linears, decoder.lm_head)]
    for layer in decoder.layers:
        if decoder.config.latent is not None:
            expansion = layer.attention.expansion.native
            matrices += [expansion.to_keys.native, expansion.to_values.native]
    return {
        each.format for each in matrices if stored != torch.bfloat16 or each.in_features % 2 == 0
    }


def mlps_of(mlp):
    """Return the experts of a mixture, with the shared ones, or the MLP itself."""
    shared = getattr(mlp, "shared", None)
    return [*getattr(mlp, "experts", [mlp]), *([] if shared is None else [shared])]


def table_dtype(decoder):
    """Return the dtype of an embedding that is not tied to the head."""
    weight = decoder.embed_tokens.weight
    return weight.dtype if isinstance(weight, torch.Tensor) else None


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_16_bit_types_are_more_accurate_than_torch(directory, dtype):
    """Only weights, KV and, in bfloat16, activations are rounded."""
    (text,) = texts(1, 60)
    exact = Sequences(load(directory, 16), 16).run((0, text, 0))[0]
    ours = Sequences(load(directory, 16, dtype), 16).run((0, text, 0))[0]
    torch_model = load(directory, 16, dtype, kernels="torch")
    torchs = Sequences(torch_model, 16).run((0, text, 0))[0].float()
    # In a mixture rounding may route a token to another expert, an error that later tokens keep.
    compared = 0.2 if torch_model.config.experts else 0.5
    error, torch_error = ((each - exact).norm(dim=1).quantile(compared) for each in (ours, torchs))
    assert error < torch_error


WEIGHTS = [*((dtype, None) for dtype in DTYPES), *product(DTYPES[:2], CPU_QUANTIZATION_METHODS)]


@pytest.mark.parametrize(
    ("dtype", "quantization", "block_size"),
    [
        pytest.param(*weights, size, marks=() if size == quick else pytest.mark.slow)
        for weights, quick in zip(WEIGHTS, cycle((4, 16)), strict=False)
        for size in (4, 16)
    ],
)
def test_row_does_not_depend_on_chunking(directory, dtype, quantization, block_size):
    model = load(directory, block_size, dtype, quantization=quantization)
    (text,) = texts(1)
    whole = Sequences(model, block_size).run((0, text, 0))[0]
    for sizes in ([1, 3, 699], [256, 1, 443], [90] * 7 + [70], [17] * 5 + [415] + [17] * 11 + [13]):
        sequences, start, pieces = Sequences(model, block_size), 0, []
        for size in sizes:
            piece = text[start : start + size]
            pieces += sequences.run((0, piece, start)) if piece else []
            start += size
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("quantization", [None, *CPU_QUANTIZATION_METHODS])
def test_row_does_not_depend_on_batch(directory, quantization):
    """Run with other sequences' prefills, decode rows, and right and wrong drafts."""
    model = load(directory, 16, quantization=quantization)
    ours, *others = texts(5)
    alone = Sequences(model, 16).run((0, ours, 0))[0]
    together = Sequences(model, 16, count=5)
    together.run((3, others[2][:100], 0), (4, others[3][:260], 0))
    first = together.run((1, others[0][:513], 0), (0, ours[:300], 0), (3, others[2][100:101], 100))
    drafts = [*ours[300:304], 7, 8, 9]
    second = together.run((4, others[3][260:265], 260), (0, drafts, 300), (2, others[1], 0))
    third = together.run((0, ours[304:305], 304), (3, others[2][101:110], 101))
    assert torch.equal(first[1], alone[:300])
    assert torch.equal(second[1][:4], alone[300:304])
    assert torch.equal(third[0], alone[304:305])


THREADED = [*((dtype, None) for dtype in DTYPES), *product(DTYPES[:1], CPU_QUANTIZATION_METHODS)]


@pytest.mark.parametrize(
    ("dtype", "quantization", "count"),
    [
        pytest.param(*weights, count, marks=() if count == quick else pytest.mark.slow)
        for weights, quick in zip(THREADED, cycle((7, 2)), strict=False)
        for count in (2, 3, 5, 7)
    ],
)
def test_row_does_not_depend_on_number_of_threads(directory, count, dtype, quantization):
    model = load(directory, 16, dtype, quantization=quantization)
    first, second = texts(2)
    parts = [(0, first, 0), (1, second[:20], 0)]
    alone = Sequences(model, 16, count=2).run(*parts)
    with num_threads(count):
        shared = Sequences(model, 16, count=2)
        assert all(map(torch.equal, shared.run(*parts), alone))
        decode = shared.run((0, first[-1:], NUM_TOKENS - 1))[0]
        few = shared.run((1, second[17:20], 17))[0]  # too few rows to parallelize over rows
        # Attention divides their query tiles for some numbers of threads and KV heads.
        drafts = shared.run((0, first[-20:], NUM_TOKENS - 20))[0]
        early = shared.run((1, second[:20], 0))[0]
    assert torch.equal(decode, alone[0][-1:])
    assert torch.equal(few, alone[1][17:])
    assert torch.equal(drafts, alone[0][-20:])
    assert torch.equal(early, alone[1])


def test_ranks_have_equal_hidden_states_with_any_chunking(directory):
    (text,) = texts(1, 300)
    size = 2 if "wide" in str(directory) else 3

    def hidden(group):
        model = load(directory, 16, group=group)
        assert isinstance(model, NativeDecoder)
        whole = Sequences(model, 16).run((0, text, 0))[0]
        parts = Sequences(model, 16)
        pieces = [parts.run((0, text[i : i + 37], i))[0] for i in range(0, 300, 37)]
        assert torch.equal(torch.cat(pieces), whole)
        return whole

    logits = torch.cat(run_ranks(size, hidden), dim=1)
    expected = Sequences(load(directory, 16), 16).run((0, text, 0))[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_ranks_that_share_memory_reduce_inside_the_kernels(directory, tmp_path):
    parts = results(run_processes(2, rank_logits, directory, tmp_path / "address"))
    logits = torch.cat([torch.from_numpy(part) for part in parts], dim=1)
    expected = Sequences(load(directory, 16), 16).run((0, texts(1, 300)[0], 0))[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


class LostPeerError(RuntimeError):
    pass


def test_exception_of_a_collective_propagates(directory):
    class Broken(TensorParallelGroup):
        def all_reduce(self, tensor):
            raise LostPeerError("rank 1 has ended")

    model = load(directory, 16, group=Broken(0, 2))
    with num_threads(3), pytest.raises(LostPeerError):
        Sequences(model, 16).run((0, [1, 2, 3], 0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_invisible_kv_is_not_read(directory, bad):
    """KV of other sequences, of drafts after a query, and of unwritten blocks."""
    model = load(directory, 16)
    ours, others = texts(2)
    expected = Sequences(model, 16).run((0, ours[:300], 0))[0]
    sequences = Sequences(model, 16, count=2)
    sequences.cache.fill_(bad)
    sequences.run((1, others[:300], 0))
    rows = sequences.run((1, others[300:302], 300), (0, ours[:300], 0))[1]
    assert torch.equal(rows, expected)
