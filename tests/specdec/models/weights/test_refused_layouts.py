# Modules: specdec.models.weights.awq_gptq
"""Quantized checkpoints whose tensors are not what their files describe."""

import logging
from functools import partial

import pytest
import torch

from specdec.models.weights.awq_gptq import warn_once
from specdec.types.errors import UnsupportedModelError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.weights.test_dequantize import (
    AWQ,
    BLOCKS,
    EIGHT_BITS,
    FORMATS,
    GPTQ,
    GROUPS,
    integers,
    inverse,
    load,
)
from tests.specdec.packing import awq, float8, gptq, write_packed
from tests.specdec.packing_compressed import compressed, int8_rows
from tests.specdec.tiny import tiny_llama_dir


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("source"), intermediate=208, layers=1)


def changed(pack, change):
    """Return `pack` with other tensors than it stores. change: of the tensors, in place."""

    def packed(weight):
        tensors, plain = pack(weight)
        change(tensors)
        return tensors, plain

    return packed


def without(name):
    return lambda tensors: tensors.pop(name)


def beside(name, shape=(1,), dtype=torch.float32):
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


INT8 = FORMATS["compressed-int8"][1]
ASYMMETRIC = integers(symmetric=False, **GROUPS)
REFUSED = {
    "no-config-fp8": (None, partial(float8, per="scalar"), "weight has codes of type F8_E4M3"),
    "no-config-int8": (None, INT8, "weight has codes of type I8"),
    "no-config-gptq": (None, gptq, "weight is stored as codes"),
    "leftover-scale": (
        None,
        lambda weight: ({"weight": weight, "weight_scale": torch.ones(1)}, weight),
        "weight_scale belongs to .*_proj.weight, and no described layout",
    ),
    "fp8-of-int8": ({"quant_method": "fp8"}, INT8, "has type I8; expected F8_E4M3"),
    "fp8-no-scale": (
        {"quant_method": "fp8"},
        changed(partial(float8, per="scalar"), without("weight_scale")),
        "weight has codes of type F8_E4M3",
    ),
    "fp8-two-scales": (
        BLOCKS,
        changed(partial(float8, per="block"), beside("weight_scale")),
        "has both",
    ),
    "fp8-smoothing": (
        {"quant_method": "fp8"},
        changed(partial(float8, per="scalar"), beside("pre_quant_scale")),
        "pre_quant_scale belongs to",
    ),
    "fp8-other-blocks": (
        BLOCKS | {"weight_block_size": [32, 48]},
        partial(float8, per="block"),
        "weight_scale_inv has shape",
    ),
    "fp8-one-scale-for-blocks": (BLOCKS, inverse, "weight_scale_inv has shape"),
    "awq-finer": (AWQ | {"group_size": 16}, awq, "qzeros has shape .* expected"),
    "awq-coarser": (AWQ, partial(awq, group_size=16), "qzeros has shape .* expected"),
    "awq-no-scales": (AWQ, changed(awq, without("scales")), "has no tensor .*scales"),
    "gptq-finer": (GPTQ | {"group_size": 16}, gptq, "qzeros has shape .* expected"),
    "gptq-coarser": (GPTQ, partial(gptq, group_size=16), "qzeros has shape .* expected"),
    "gptq-other-bits": (GPTQ | {"bits": 8}, gptq, "qweight has shape .* expected"),
    "gptq-no-order": (
        GPTQ | {"desc_act": True},
        partial(gptq, desc_act=True, with_index=False),
        "has no tensor .*g_idx",
    ),
    "gptq-zero-index": (
        GPTQ,
        changed(gptq, lambda tensors: tensors["g_idx"].zero_()),
        "g_idx must have all groups from 0 to 17",
    ),
    "compressed-finer": (
        integers(**GROUPS | {"group_size": 16}),
        compressed,
        "weight_scale has shape .* expected",
    ),
    "compressed-by-output": (
        integers(**GROUPS),
        partial(compressed, group_size=-1),
        "weight_scale has shape .* expected",
    ),
    "compressed-no-scale": (
        integers(**GROUPS),
        changed(compressed, without("weight_scale")),
        "has no tensor .*weight_scale",
    ),
    "compressed-no-zeros": (ASYMMETRIC, compressed, "has no tensor .*weight_zero_point"),
    "compressed-no-order": (
        integers(**GROUPS, actorder="group"),
        compressed,
        "has no tensor .*weight_g_idx",
    ),
    "nvfp4-no-divisor": (
        FORMATS["compressed-nvfp4"][0],
        changed(FORMATS["compressed-nvfp4"][1], without("weight_global_scale")),
        "has no tensor .*weight_global_scale",
    ),
    "bitsandbytes-no-scale": (
        EIGHT_BITS,
        changed(int8_rows, without("SCB")),
        "weight has codes of type I8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_does_not_describe_is_refused_by_name(source, tmp_path, name):
    config, pack, words = REFUSED[name]
    write_packed(source, tmp_path / "a", tmp_path / "b", config, pack)
    with pytest.raises(UnsupportedModelError, match=words):
        run_ranks(1, lambda group: load(tmp_path / "a", group))


def test_zero_points_of_another_version_are_logged_once(source, tmp_path, caplog):
    write_packed(source, tmp_path / "a", tmp_path / "b", *FORMATS["gptq-of-another-version"])
    warn_once.cache_clear()
    run_ranks(1, lambda group: load(tmp_path / "a", group))
    assert caplog.text.count("are of the other version of the layout") == 1


def test_scales_of_activations_are_not_part_of_a_weight(source, tmp_path, caplog):
    pack = changed(partial(float8, per="scalar"), beside("input_scale"))
    write_packed(source, tmp_path / "a", tmp_path / "b", {"quant_method": "fp8"}, pack)
    with caplog.at_level(logging.INFO):
        run_ranks(1, lambda group: load(tmp_path / "a", group))
    (record,) = [each for each in caplog.records if "input_scale" in each.getMessage()]
    assert record.levelno == logging.INFO
    assert "scales of activations and of cached keys and values: 7 tensors" in record.getMessage()
