"""Quantized checkpoints on Triton's kernels: logits are those of the dequantized model."""

from functools import partial

import pytest
import torch

from specdec.kernels.reference.packed_weight import CodeKind, quantize_weight
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.kernels.triton import packed
from specdec.models.config.model_config import ModelConfig
from specdec.models.layers.quantized_matrix import QuantizedMatrix
from specdec.models.loading import load_model
from specdec.types.errors import UnsupportedModelError
from tests.specdec.engines import (
    draft_model,
    engine_config,
    local_engine,
    request,
    tokens_by,
)
from tests.specdec.models.passes import mixed_logits
from tests.specdec.packing import awq, float8, gptq, write_packed
from tests.specdec.packing_compressed import compressed
from tests.specdec.tiny import tiny_llama_dir

IDS = ([(5 * i) % 300 for i in range(34)], [(7 * i) % 300 for i in range(27)])
GROUP = {"weights": {"num_bits": 4, "group_size": 16}}
FORMATS = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16}, partial(awq, group_size=16)),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        partial(gptq, group_size=16, desc_act=True),
    ),
    "compressed": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": GROUP},
        },
        partial(compressed, group_size=16),
    ),
    "fp8": ({"quant_method": "fp8"}, partial(float8, per="channel")),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 48]},
        partial(float8, per="block"),
    ),
}


@pytest.fixture(scope="module")
def dirs(tmp_path_factory):
    """Return a function to a packed model and the same one dequantized, by format."""
    source = tiny_llama_dir(tmp_path_factory.mktemp("source"), intermediate=208, layers=1)
    made = {}

    def find(name):
        if name not in made:
            place = tmp_path_factory.mktemp(name)
            config, pack = FORMATS[name]
            write_packed(source, place / "packed", place / "plain", config, pack)
            made[name] = place / "packed", place / "plain"
        return made[name]

    return find


def load(directory, group, **options):
    config = ModelConfig.from_directory(directory)
    return load_model(
        directory,
        config,
        group,
        dtype=torch.float32,
        max_model_len=64,
        block_size=4,
        kernels="triton",
        **options,
    )


def matrices(model):
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            yield linear.matrix


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_logits_are_those_of_the_dequantized_model(dirs, name, monkeypatch):
    """With prompts, whose many rows are multiplied dequantized, with decodes and with drafts."""
    monkeypatch.setattr(packed, "MOST_FEW_ROWS", dict.fromkeys(packed.MOST_FEW_ROWS, 8))
    group, (quantized, plain) = TensorParallelGroup(), dirs(name)
    found = mixed_logits(quantized, IDS, group, kernels="triton")
    expected = mixed_logits(plain, IDS, group, kernels="torch")
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_have_their_part_of_the_values(dirs, name, rank):
    """Packed where it begins at a group of inputs, else dequantized."""
    group, dense = TensorParallelGroup(rank, 2), []
    models = [load(directory, group) for directory in dirs(name)]
    for own, plain in zip(*map(matrices, models), strict=True):
        values = own.weight.values() if isinstance(own, QuantizedMatrix) else own.weight.t()
        if isinstance(own, QuantizedMatrix) and own.weight.order is not None:
            values = torch.empty_like(values).index_copy_(1, own.weight.order, values)
        torch.testing.assert_close(values, plain.weight.t(), atol=1e-6, rtol=1e-6)
        dense.append(not isinstance(own, QuantizedMatrix))
    assert not dense[0]
    assert not dense[2]
    assert any(dense) == (rank == 1 or name == "gptq") or name == "fp8"


@pytest.mark.parametrize("name", FORMATS)
def test_weights_stay_packed(dirs, name):
    model = load(dirs(name)[0], TensorParallelGroup())
    found = list(matrices(model))
    assert all(isinstance(each, QuantizedMatrix) for each in found)
    kind = CodeKind.FLOAT8 if name.startswith("fp8") else CodeKind.INT4
    assert {each.weight.kind for each in found} == {kind}
    config = ModelConfig.from_directory(dirs(name)[0])
    num_bytes = sum(each.weight.num_bytes for each in found)
    num_elements = sum(each.weight.shape[0] * each.weight.shape[1] for each in found)
    assert num_bytes <= num_elements * (config.stored_weights.bits + 3) / 8  # blocks of 48


@pytest.mark.slow
def test_drafts_change_no_token(dirs):
    """In deterministic mode, where a row has the same bits in any batch."""
    quantized = dirs("awq")[0]
    asked = [request("r0", [11, 12, 11, 12], max_tokens=3)]
    found = []
    for num_draft_tokens in (0, 3):
        config = engine_config(num_draft_tokens, max_num_seqs=2, deterministic=True)
        engine = local_engine(quantized, config, kernels="triton")
        found.append(tokens_by(engine, asked))
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_weights_are_quantized_when_they_are_loaded(tiny_model_dir, method):
    """The output head too; each output has the codes that it has alone."""
    plain = load(tiny_model_dir, TensorParallelGroup())
    model = load(tiny_model_dir, TensorParallelGroup(), quantization=method)
    kind, group = (CodeKind.INT4, 128) if method == "int4" else (CodeKind.INT8, None)
    found = [model.lm_head.matrix, *matrices(model)]
    dense = [plain.lm_head.matrix, *matrices(plain)]
    for own, full in zip(found, dense, strict=True):
        expected = quantize_weight(full.weight.t(), kind, group)
        assert torch.equal(own.weight.codes, expected.codes)
        assert torch.equal(own.weight.scales, expected.scales)
    assert model.lm_head.table is None


def test_quantized_drafts_change_no_token(tmp_path):
    directory = tiny_llama_dir(tmp_path, layers=1)
    asked = [request("r0", [11, 12, 11, 12], max_tokens=3)]
    plain = tokens_by(local_engine(directory, engine_config(0), kernels="torch"), asked)
    proposer = draft_model(directory, quantization="int8", kernels="triton")
    drafting = local_engine(directory, engine_config(3), proposer=proposer, kernels="torch")
    assert tokens_by(drafting, asked) == plain
    assert drafting.stats().counts.speculation.num_accepted_tokens > 0


def test_int4_needs_whole_words(tmp_path):
    directory = tiny_llama_dir(tmp_path / "odd", intermediate=204, layers=1)
    with pytest.raises(UnsupportedModelError, match="inputs are a multiple of 8, not 204"):
        load(directory, TensorParallelGroup(), quantization="int4")
