"""Kernels of mixtures of experts, for the shapes of Mixtral-8x7B, Qwen3-30B-A3B and DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.kernels.reference.packed_weight import CodeKind
from specdec.kernels.triton.device import experts
from specdec.kernels.triton.device.packed import NUMBERS
from specdec.kernels.triton.experts import TileSizes
from specdec.kernels.triton.packed import BLOCK_K, KINDS
from tools.gpu_kernels.packed_variants import CODES
from tools.gpu_kernels.variant import ELEMENT_BYTES, Variant, power_of_two

_ROUTERS = {
    "mixtral": (2, 1, 8, 1, False),
    "qwen3": (8, 1, 128, 1, False),
    "deepseek_v3": (8, 8, 32, 4, True),
}
"""Experts of a token, groups, experts of each, groups that are chosen, whether by sigmoids."""


def expert_variants() -> Iterator[Variant]:
    """Yield routes, tiles, products of few and of many rows, and the sum."""
    yield from _route_variants()
    yield from _tile_variants()
    for dtype, num_pairs in (("bf16", 2), ("bf16", 2**16), ("fp32", 2)):
        yield from _product_variants(dtype, num_pairs)
    for kind in CodeKind:
        for num_pairs in (2, 2**16):
            sizes = TileSizes.of(num_pairs, 8, 2, invariant=False, is_packed=True)
            yield from _packed_variants(kind, sizes)
    types = {
        **dict.fromkeys(("results", "base", "output"), "*bf16"),
        "weights": "*fp32",
        "chosen": "*i32",
        **dict.fromkeys(("size", "first_expert", "num_experts"), "i32"),
    }
    constants = {"PER_TOKEN": 8, "HAS_BASE": True, "BLOCK": 1024}
    yield Variant("add_results_bf16", experts.add_results, types, constants, {"num_warps": 4})


def _route_variants() -> Iterator[Variant]:
    for name, (per_token, groups, size, num_chosen, is_sigmoid) in _ROUTERS.items():
        types = {
            **dict.fromkeys(("logits", "bias", "weights"), "*fp32"),
            "chosen": "*i32",
            "scale": "fp32",
        }
        constants = {
            "PER_TOKEN": per_token,
            "GROUPS": groups,
            "GROUP_SIZE": size,
            "CHOSEN_GROUPS": num_chosen,
            "IS_SIGMOID": is_sigmoid,
            "ADDS_TWO_BEST": is_sigmoid,
            "HAS_BIAS": is_sigmoid,
            "NORMALIZES": True,
            "BLOCK_G": power_of_two(groups),
            "BLOCK_E": power_of_two(size),
            "BLOCK_T": power_of_two(per_token),
        }
        options = {"num_warps": 1 if groups * size <= 128 else 2}
        yield Variant(f"route_{name}", experts.route, types, constants, options)


def _tile_variants() -> Iterator[Variant]:
    types = {
        **dict.fromkeys(("chosen", "order", "tiles"), "*i32"),
        **dict.fromkeys(("num_pairs", "first_expert", "num_tiles"), "i32"),
    }
    for is_sparse, block in ((True, 16), (False, 1024)):
        constants = {"IS_SPARSE": is_sparse, "BLOCK_M": 16, "BLOCK_P": block}
        name = f"plan_tiles_{block}"
        yield Variant(name, experts.plan_tiles, types, constants, {"num_warps": 4})


def _product_variants(dtype: str, num_pairs: int) -> Iterator[Variant]:
    """Yield both products of experts with plain gates, and those of GPT-OSS in bfloat16."""
    sizes = TileSizes.of(num_pairs, 8, ELEMENT_BYTES[dtype], invariant=False)
    options = {"num_warps": 4, "num_stages": 3}
    name = f"{dtype}_{sizes.rows}"
    shared = {
        **dict.fromkeys(("scales", "zeros", "bias", "output"), f"*{dtype}"),
        **dict.fromkeys(("order", "tiles"), "*i32"),
        **dict.fromkeys(("size", "inner", "group_size", "num_groups"), "i32"),
    }
    kind = {"KIND": NUMBERS.value, "HAS_ZEROS": False, "IS_COARSE": False}
    for is_gpt_oss in (False, True) if dtype == "bf16" else (False,):
        suffix = f"{name}{'_gpt_oss' if is_gpt_oss else ''}"
        numbers = dict.fromkeys(("x", "gate_up"), f"*{dtype}")
        constants = {
            **kind,
            **{"PER_TOKEN": 2, "IS_CLAMPED": is_gpt_oss, "HAS_BIAS": is_gpt_oss},
            **{"BLOCK_M": sizes.rows, "BLOCK_N": sizes.units, "BLOCK_K": sizes.inputs},
        }
        types = {**numbers, **shared, "x_stride": "i32"}
        multiples = ("size", "inner", "x_stride")
        kernel = experts.hidden_units
        yield Variant(
            f"hidden_units_{suffix}", kernel, types, constants, options, multiples=multiples
        )
        numbers = dict.fromkeys(("units", "down"), f"*{dtype}")
        constants = {
            **kind,
            "HAS_BIAS": is_gpt_oss,
            **{"BLOCK_M": sizes.rows, "BLOCK_N": sizes.results, "BLOCK_K": sizes.inputs},
        }
        yield Variant(
            f"expert_results_{suffix}",
            experts.expert_results,
            {**numbers, **shared},
            constants,
            options,
            multiples=("size", "inner"),
        )


def _packed_variants(kind: CodeKind, sizes: TileSizes) -> Iterator[Variant]:
    """Yield both products of experts in few bits, whose groups a program loads whole."""
    has_zeros = kind is CodeKind.INT4
    integers = ("size", "inner", "group_size", "num_groups")
    shared = {
        "scales": "*fp16" if has_zeros else "*fp32",
        "zeros": "*u8" if has_zeros else "*fp32",
        **dict.fromkeys(("bias", "output"), "*bf16"),
        **dict.fromkeys(("order", "tiles"), "*i32"),
        **dict.fromkeys(integers, "i32"),
    }
    constants = {
        **{"KIND": KINDS[kind], "HAS_ZEROS": has_zeros, "IS_COARSE": True, "HAS_BIAS": False},
        **{"BLOCK_M": sizes.rows, "BLOCK_K": BLOCK_K[kind]},
    }
    options, multiples = {"num_warps": 4, "num_stages": 3}, ("size", "inner", "group_size")
    yield Variant(
        f"packed_hidden_units_{kind.value}_m{sizes.rows}",
        experts.hidden_units,
        {**shared, "gate_up": CODES[kind], "x": "*bf16", "x_stride": "i32"},
        {**constants, "PER_TOKEN": 2, "IS_CLAMPED": False, "BLOCK_N": sizes.units},
        options,
        multiples=(*multiples, "x_stride"),
    )
    yield Variant(
        f"packed_expert_results_{kind.value}_m{sizes.rows}",
        experts.expert_results,
        {**shared, "down": CODES[kind], "units": "*bf16"},
        {**constants, "BLOCK_N": sizes.results},
        options,
        multiples=multiples,
    )
