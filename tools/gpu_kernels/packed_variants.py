"""Products by weights in few bits, with the constants of Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.kernels.reference.packed_weight import CodeKind
from specdec.kernels.triton.device import packed
from specdec.kernels.triton.packed import BLOCK_K, BLOCK_N, FLOAT8_BLOCK_K, KINDS, STAGES
from tools.gpu_kernels.variant import Variant

CODES = {CodeKind.INT4: "*i32", CodeKind.INT8: "*i8", CodeKind.FLOAT8: "*u8"}
_INTEGERS = ("num_rows", "size", "inner", "group_size", "num_groups", "part_size", "base_stride")


def packed_variants() -> Iterator[Variant]:
    """Yield products of few rows by parts, of more as a whole, and dequantization."""
    for kind in CodeKind:
        yield _product(kind, block_m=16, is_part=True)
        yield _product(kind, block_m=32, is_part=False)
        yield _dequantize(kind)
    yield _product(CodeKind.INT4, block_m=16, is_part=True, is_coarse=False)
    for block_m in (16, 32):
        yield _float8_product(block_m)


def _product(kind: CodeKind, *, block_m: int, is_part: bool, is_coarse: bool = True) -> Variant:
    has_zeros = kind is CodeKind.INT4
    types = {
        **dict.fromkeys(("x", "base"), "*bf16"),
        "codes": CODES[kind],
        "scales": "*fp16" if has_zeros else "*fp32",
        "zeros": "*u8" if has_zeros else "*fp32",
        "output": "*fp32" if is_part else "*bf16",
        **dict.fromkeys((*_INTEGERS, "x_stride"), "i32"),
    }
    constants = {
        "KIND": KINDS[kind],
        **{"NUM_PARTS": 4, "IS_PART": is_part, "HAS_BASE": not is_part, "HAS_ZEROS": has_zeros},
        **{"IS_COARSE": is_coarse, "BLOCK_M": block_m, "BLOCK_N": BLOCK_N},
        "BLOCK_K": BLOCK_K[kind],
    }
    marks = ["part" if is_part else "whole", *([] if is_coarse else ["small_groups"])]
    name = f"packed_product_{kind.value}_m{block_m}_{'_'.join(marks)}"
    multiples = ("size", "inner", "group_size", "part_size", "x_stride", "base_stride")
    options = {"num_warps": 4, "num_stages": STAGES}
    return Variant(name, packed.packed_product, types, constants, options, multiples=multiples)


def _dequantize(kind: CodeKind) -> Variant:
    has_zeros = kind is CodeKind.INT4
    types = {
        "codes": CODES[kind],
        "scales": "*fp16" if has_zeros else "*fp32",
        "zeros": "*u8" if has_zeros else "*fp32",
        "output": "*bf16",
        **dict.fromkeys(("size", "inner", "group_size", "num_groups"), "i32"),
    }
    constants = {"KIND": KINDS[kind], "HAS_ZEROS": has_zeros, "BLOCK_N": 32, "BLOCK_K": 128}
    multiples = ("size", "inner", "group_size")
    name = f"dequantize_{kind.value}"
    return Variant(name, packed.dequantize, types, constants, {"num_warps": 4}, multiples=multiples)


def _float8_product(block_m: int) -> Variant:
    types = {
        **dict.fromkeys(("x", "codes"), "*fp8e4nv"),
        **dict.fromkeys(("x_scales", "scales"), "*fp32"),
        **dict.fromkeys(("base", "output"), "*bf16"),
        **dict.fromkeys((*_INTEGERS, "x_group_size", "num_x_groups"), "i32"),
    }
    constants = {
        **{"NUM_PARTS": 4, "IS_PART": False, "HAS_BASE": True},
        **{"BLOCK_M": block_m, "BLOCK_N": BLOCK_N, "BLOCK_K": FLOAT8_BLOCK_K},
    }
    return Variant(
        f"float8_product_m{block_m}",
        packed.float8_product,
        types,
        constants,
        {"num_warps": 4, "num_stages": 3},
        architectures=(90,),
        multiples=("size", "inner", "group_size", "x_group_size", "part_size", "base_stride"),
    )
