"""The GPU kernels with the constants of common models, as they are launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specdec.kernels.triton import lora
from specdec.kernels.triton.attention import block_of_keys, warps_of_tile
from specdec.kernels.triton.device import (
    attention,
    edits,
    products,
    rows,
    sample,
    store_kv,
    verify,
)
from specdec.kernels.triton.device import lora as device_lora
from specdec.kernels.triton.products import BLOCK_M, BLOCK_N, block_of_inner
from specdec.kernels.triton.rows import warps_of_row

ARCHITECTURES = (80, 90)

Types = Mapping[str, str]


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants, as it is launched.

    types: Triton's names of argument types, e.g. "*bf16" for an address. constants: compile-time
    arguments. options: number of warps and stages. architectures: that it is compiled for.
    multiples: integer arguments that are multiples of 16 for all models of this shape.
    """

    name: str
    kernel: Any
    types: Types
    constants: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)
    architectures: tuple[int, ...] = ARCHITECTURES
    multiples: tuple[str, ...] = ()


def variants() -> Iterator[Variant]:
    """Yield every kernel, for the shapes of common models."""
    yield from _attention_variants()
    yield from _row_variants()
    yield from _product_variants()
    yield from _lora_variants()
    yield from _sampling_variants()
    yield _edit_variant()
    yield from _verification_variants()


_SHAPES = {64: (9, 3), 80: (32, 32), 96: (32, 32), 128: (32, 8), 256: (16, 8)}
"""Query and KV heads by head size: SmolLM2, Phi-2, Phi-3-mini, Llama-3.1-8B, Gemma-2-9B."""
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1}


def _attention_variants() -> Iterator[Variant]:
    for head_dim in _SHAPES:
        yield _attention(head_dim, 16, "parts")
        for tile in (16, 32, 64):
            yield _attention(head_dim, tile, "segments")
        yield _attention(head_dim, 64, "whole")
        yield _attention(head_dim, 64, "whole", is_ragged=True)
        yield _merge(head_dim)
        yield _store(head_dim)
    yield _attention(128, 64, "parts", has_trees=True)
    yield _attention(128, 16, "parts", has_cap=True)
    yield _attention(128, 16, "parts", dtype="fp16")
    yield _attention(64, 16, "parts", dtype="fp32")
    yield _attention(128, 16, "parts", kv_dtype="fp8e4nv", architectures=(90,))
    yield _attention(128, 64, "whole", kv_dtype="fp8e4nv", architectures=(90,))
    yield _store(128, kv_dtype="fp8e4nv", architectures=(90,))
    yield _store(128, has_norm=True)


def _attention(
    head_dim: int,
    tile: int,
    context: Literal["whole", "segments", "parts"],
    *,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    has_trees: bool = False,
    has_cap: bool = False,
    is_ragged: bool = False,
    architectures: tuple[int, ...] = ARCHITECTURES,
) -> Variant:
    """Return attention with a context as a whole, by segments, or with a part for each segment.

    is_ragged: whether the batch is a RaggedBatch, for contexts as a whole.
    """
    kv_dtype, has_parts = kv_dtype or dtype, context == "parts"
    is_on_device = is_ragged or context == "segments"  # made there, or a host's plan
    index = "*i64" if is_on_device else "*i32"
    integers = ("table_stride", "num_segments", "part_rows", "window", "kv_start")
    floats = ("scale", "soft_cap", "key_scale", "value_scale")
    types = {
        "query": f"*{dtype}",
        "kv_cache": f"*{kv_dtype}",
        "output": "*fp32" if has_parts else f"*{dtype}",
        "statistics": "*fp32" if has_parts else f"*{dtype}",
        **dict.fromkeys(("tile_sequences", "tile_tokens", "cu_seqlens"), "*i32"),
        **dict.fromkeys(("context_lens", "first_nodes", "block_tables", "positions"), index),
        "ancestors": "*i64" if has_trees else index,
        **dict.fromkeys(integers, "i32"),
        **dict.fromkeys(floats, "fp32"),
    }
    block_d = _power_of_two(head_dim)
    constants = {
        **_heads_of(head_dim),
        "PAGE": 16,
        "BLOCK_M": tile,
        "BLOCK_N": block_of_keys(block_d, _ELEMENT_BYTES[dtype]),
        "HAS_TREES": has_trees,
        "HAS_CAP": has_cap,
        "HAS_SEGMENTS": context != "whole",
        "HAS_PARTS": has_parts,
    }
    marks = [dtype, *([kv_dtype] if kv_dtype != dtype else []), f"d{head_dim}", f"m{tile}"]
    marks += [context, *(["trees"] if has_trees else []), *(["cap"] if has_cap else [])]
    marks += ["ragged"] if is_ragged else []
    options = {"num_warps": warps_of_tile(tile, block_d), "num_stages": 2}
    name = "_".join(["paged_attention", *marks])
    return Variant(name, attention.paged_attention, types, constants, options, architectures)


def _merge(head_dim: int) -> Variant:
    types = {
        **dict.fromkeys(("partial", "statistics"), "*fp32"),
        "output": "*bf16",
        **dict.fromkeys(("tile_sequences", "tile_tokens", "cu_seqlens"), "*i32"),
        "context_lens": "*i64",
        **dict.fromkeys(("num_segments", "part_rows"), "i32"),
        "value_scale": "fp32",
    }
    constants = {**_heads_of(head_dim), "BLOCK_M": 16, "BLOCK_ROWS": 4}
    name = f"merge_segments_bf16_d{head_dim}"
    return Variant(name, attention.merge_segments, types, constants, {"num_warps": 4})


def _store(
    head_dim: int,
    *,
    kv_dtype: str = "bf16",
    has_norm: bool = False,
    architectures: tuple[int, ...] = ARCHITECTURES,
) -> Variant:
    heads, kv_heads = _SHAPES[head_dim]
    addresses = ("heads", "query", "cos", "sin", "query_norm", "key_norm")
    types = {
        **dict.fromkeys(addresses, "*bf16"),
        "kv_cache": f"*{kv_dtype}",
        "slots": "*i32",
        "token_stride": "i32",
        **dict.fromkeys(("eps", "key_scale", "value_scale"), "fp32"),
    }
    constants = {
        "NUM_HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": head_dim,
        "BLOCK_D": _power_of_two(head_dim),
        "BLOCK_H": 4,
        "ROTATES": True,
        "HAS_NORM": has_norm,
        "LARGEST": 448.0 if kv_dtype == "fp8e4nv" else 0.0,
    }
    name = f"rotate_and_store_{kv_dtype}_d{head_dim}{'_norm' if has_norm else ''}"
    options = {"num_warps": 4}
    return Variant(name, store_kv.rotate_and_store, types, constants, options, architectures)


def _row_variants() -> Iterator[Variant]:
    for size in (576, 4096, 8192, 14336):
        row = {"SIZE": size, "BLOCK": _power_of_two(size)}
        options = {"num_warps": warps_of_row(size)}
        if size <= 8192:
            types = {
                **dict.fromkeys(("x", "residual", "weight", "total", "output"), "*bf16"),
                "x_stride": "i32",
                "eps": "fp32",
            }
            for adds in (False, True):
                name = f"rms_norm_bf16_{size}{'_add' if adds else ''}"
                yield Variant(name, rows.rms_norm, types, {**row, "ADDS": adds}, options)
        for kind, largest in (("i8", 127.0), ("fp8e4nv", 448.0)):
            types = {"x": "*bf16", "quantized": f"*{kind}", "scales": "*fp32", "stride": "i32"}
            constants = {**row, "LARGEST": largest, "ROUNDS": kind == "i8"}
            supported = ARCHITECTURES if kind == "i8" else (90,)
            name = f"quantize_row_{kind}_{size}"
            yield Variant(name, rows.quantize_row, types, constants, options, supported)
    types = {**dict.fromkeys(("gate_up", "output"), "*bf16"), "stride": "i32", "size": "i32"}
    yield Variant("silu_mul_bf16", rows.silu_mul, types, {"BLOCK": 1024}, {"num_warps": 4})


def _product_variants() -> Iterator[Variant]:
    """Yield products of Llama-3.1-8B: down projection by parts and as a whole, and the head."""
    integers = ("num_rows", "size", "inner", "part_size", "x_stride", "outer_stride", "base_stride")
    for dtype, output, num_parts, is_part, has_base in (
        ("bf16", "fp32", 4, True, False),
        ("bf16", "bf16", 4, False, True),
        ("bf16", "fp32", 1, False, False),
        ("fp32", "fp32", 4, True, False),
    ):
        types = {
            **dict.fromkeys(("x", "weight", "base"), f"*{dtype}"),
            "output": f"*{output}",
            **dict.fromkeys(integers, "i32"),
        }
        constants = {
            "inner_stride": 1,
            **{"NUM_PARTS": num_parts, "IS_PART": is_part, "HAS_BASE": has_base},
            **{"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N},
            "BLOCK_K": block_of_inner(_ELEMENT_BYTES[dtype]),
        }
        name = f"product_{dtype}_to_{output}{'_part' if is_part else ''}"
        options = {"num_warps": 4, "num_stages": 4}
        yield Variant(name, products.product, types, constants, options, multiples=integers[1:])
    types = {
        "parts": "*fp32",
        **dict.fromkeys(("base", "output"), "*bf16"),
        **dict.fromkeys(("num_rows", "size", "base_stride"), "i32"),
    }
    constants = {"NUM_PARTS": 4, "HAS_BASE": True, "BLOCK": 1024}
    yield Variant("add_parts_bf16", products.add_parts, types, constants, {"num_warps": 4})


def _lora_variants() -> Iterator[Variant]:
    """Yield updates of Llama-3.1-8B's fused projections of queries, keys and values."""
    integers = ("num_rows", "inner", "num_ranks", "part_size", "x_stride", "size", "y_stride")
    parts = lora.num_parts_of(4096)
    for dtype, rank in (("bf16", 16), ("bf16", 64), ("bf16", 128), ("fp32", 16)):
        types = {
            **dict.fromkeys(("x", "downs", "ups", "output"), f"*{dtype}"),
            "hidden": "*fp32",
            **dict.fromkeys(("places", "tiles"), "*i32"),
            **dict.fromkeys(integers, "i32"),
        }
        blocks = {"BLOCK_M": lora.BLOCK_M, "BLOCK_R": lora.block_of_ranks(rank)}
        shrink = {**blocks, "BLOCK_K": lora.block_of_inner(_ELEMENT_BYTES[dtype])}
        expand = {**blocks, "NUM_PARTS": parts, "RANK": rank, "BLOCK_N": lora.BLOCK_N}
        for kernel, constants, stages in (
            (device_lora.shrink, shrink, 3),
            (device_lora.expand, expand, 2),
        ):
            options = {"num_warps": 4, "num_stages": stages}
            name = f"lora_{kernel.__name__}_{dtype}_r{rank}"
            yield Variant(name, kernel, types, constants, options, multiples=integers[1:])


def _sampling_variants() -> Iterator[Variant]:
    integers = dict.fromkeys(("stride", "vocab_size", "num_tiles"), "i32")
    tiles = {"best": "*fp32", "best_ids": "*i32"}
    limits = {
        **dict.fromkeys(("row_best", "temperatures", "min_scores", "floors"), "*fp32"),
        "tile_best": "*fp32",
        "top_k": "*i64",
        "top_p": "*fp64",
    }
    reduced = {
        **tiles,
        "is_invalid": "*i32",
        "row_best": "*fp32",
        "token_ids": "*i64",
        "has_nan": "*i32",
        **integers,
    }
    exact = {"num_warps": 8, "enable_fp_fusion": False}
    yield Variant("row_argmax", sample.row_argmax, reduced, {"BLOCK_TILES": 64}, {"num_warps": 1})
    for dtype in ("fp32", "bf16"):
        logits = {"logits": f"*{dtype}", **integers}
        yield Variant(
            f"tile_argmax_{dtype}",
            sample.tile_argmax,
            {**logits, **tiles, "is_invalid": "*i32"},
            {"BLOCK": 2048},
            {"num_warps": 4},
        )
        yield Variant(
            f"truncation_floors_{dtype}",
            sample.truncation_floors,
            {**logits, **limits},
            {"BLOCK": 2048, "BLOCK_TILES": 64},
            exact,
        )
        yield Variant(
            f"perturbed_argmax_{dtype}",
            sample.perturbed_argmax,
            {
                **logits,
                **tiles,
                **dict.fromkeys(("row_best", "temperatures", "floors"), "*fp32"),
                **dict.fromkeys(("seeds", "choices", "positions"), "*i64"),
                "least_floor": "fp32",
            },
            {"BLOCK": 2048},
            exact,
        )


def _edit_variant() -> Variant:
    integers = ("stride", "num_tokens", "num_drafts", "first_token", "num_words")
    types = {
        "logits": "*fp32",
        **dict.fromkeys(("changes", "paths"), "*i64"),
        "penalties": "*fp64",
        **dict.fromkeys(("masks", "seen"), "*i32"),
        **dict.fromkeys(integers, "i32"),
    }
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return Variant("edit_rows", edits.edit_rows, types, {"BLOCK": 2048}, options)


def _verification_variants() -> Iterator[Variant]:
    names = (
        *("draft_ids", "parents", "num_nodes", "row_starts", "token_ids", "num_tokens", "path"),
        *("first_nodes", "block_tables", "sources", "targets"),
    )
    types = {
        **dict.fromkeys(names, "*i32"),
        "sampled": "*i64",
        **dict.fromkeys(("max_nodes", "table_stride", "layer_stride", "num_moves"), "i32"),
    }
    one_warp = {"num_warps": 1}
    for block in (8, 64):
        yield Variant(f"walk_tree_{block}", verify.walk_tree, types, {"BLOCK": block}, one_warp)
        constants = {"BLOCK": block, "PAGE": 16}
        yield Variant(f"path_moves_{block}", verify.path_moves, types, constants, one_warp)
    moved = {**types, "kv_cache": "*bf16", "layer_stride": "i64"}
    constants = {"SIZE": 2048, "BLOCK": 1024}
    yield Variant("move_slots_bf16", verify.move_slots, moved, constants, {"num_warps": 4})


def _heads_of(head_dim: int) -> dict[str, object]:
    heads, kv_heads = _SHAPES[head_dim]
    return {
        "NUM_HEADS": heads,
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "FIRST_HEAD": 0,
        "HEAD_DIM": head_dim,
        "BLOCK_D": _power_of_two(head_dim),
    }


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
