"""The GPU kernels with the constants of common models, as they are launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specdec.config.gpu.truncation_search import TILE_TOKENS
from specdec.kernels.triton import lora
from specdec.kernels.triton import ngram as lookups
from specdec.kernels.triton.device import (
    best_first,
    children,
    edits,
    ngram,
    products,
    rows,
    sample,
    truncation,
    truncation_rounds,
    verify,
)
from specdec.kernels.triton.device import lora as device_lora
from specdec.kernels.triton.products import (
    FEW_ROWS_TILE,
    FLOAT32_TILE,
    HEADS_TILE,
    MANY_ROWS_TILE,
    MAPPED_PARTS_TILE,
    MAPPED_TILE,
    Tile,
)
from specdec.kernels.triton.rows import warps_of_row
from tools.gpu_kernels.attention_variants import attention_variants
from tools.gpu_kernels.expert_variants import expert_variants
from tools.gpu_kernels.packed_variants import packed_variants
from tools.gpu_kernels.recurrent_variants import recurrent_variants
from tools.gpu_kernels.variant import ARCHITECTURES, ELEMENT_BYTES, Variant, power_of_two


def variants() -> Iterator[Variant]:
    """Yield every kernel, for the shapes of common models."""
    yield from attention_variants()
    yield from _row_variants()
    yield from _product_variants()
    yield from packed_variants()
    yield from expert_variants()
    yield from recurrent_variants()
    yield from _lora_variants()
    yield from _sampling_variants()
    yield from _truncation_variants()
    yield from _children_variants()
    yield _edit_variant()
    yield from _verification_variants()
    yield from _lookup_variants()


def _row_variants() -> Iterator[Variant]:
    for size in (576, 4096, 8192, 14336):
        row = {"SIZE": size, "BLOCK": power_of_two(size)}
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
    for dtype, output, num_parts, is_part, has_base, tile in (
        ("bf16", "fp32", 4, True, False, FEW_ROWS_TILE),
        ("bf16", "bf16", 4, False, True, FEW_ROWS_TILE),
        ("bf16", "bf16", 4, False, True, MANY_ROWS_TILE),
        ("bf16", "bf16", 4, False, True, MAPPED_PARTS_TILE),
        ("bf16", "fp32", 1, False, False, FEW_ROWS_TILE),
        ("bf16", "fp32", 1, False, False, MAPPED_TILE),
        ("fp32", "fp32", 4, True, False, FLOAT32_TILE),
    ):
        constants = {"NUM_PARTS": num_parts, "IS_PART": is_part, "HAS_BASE": has_base}
        yield _product(dtype, output, tile, constants)
    types = {
        "parts": "*fp32",
        **dict.fromkeys(("base", "output"), "*bf16"),
        **dict.fromkeys(("num_rows", "size", "base_stride"), "i32"),
    }
    constants = {"NUM_PARTS": 4, "HAS_BASE": True, "BLOCK": 1024}
    yield Variant("add_parts_bf16", products.add_parts, types, constants, {"num_warps": 4})
    yield _head_product_variant()


def _product(dtype: str, output: str, tile: Tile, constants: Mapping[str, object]) -> Variant:
    """Return a product by tiles of a shape."""
    sizes = ("num_rows", "size", "inner", "part_size", "base_stride")
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    name = f"product_{dtype}_to_{output}_m{tile.block_m}_n{tile.block_n}"
    name += "_part" if constants["IS_PART"] else ""
    types = {
        "base": f"*{dtype}",
        "output": f"*{output}",
        **dict.fromkeys(sizes, "i32"),
    }
    if tile.is_mapped:
        types |= {
            "x": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_k}]>",
            "weight": f"tensordesc<{dtype}[{tile.block_n}, {tile.block_k}]>",
        }
        return Variant(
            f"mapped_{name}",
            products.mapped_product,
            types,
            {**constants, **blocks},
            options,
            (90,),
            multiples=sizes[1:],
        )
    strides = ("x_stride", "outer_stride")
    types |= {**dict.fromkeys(("x", "weight"), f"*{dtype}"), **dict.fromkeys(strides, "i32")}
    return Variant(
        name,
        products.product,
        types,
        {**constants, **blocks, "inner_stride": 1},
        options,
        multiples=(*sizes[1:], *strides),
    )


def _head_product_variant() -> Variant:
    """Return the products of DeepSeek's heads with the matrices that expand latents."""
    integers = ("size", "inner", "x_stride", "x_head_stride", "stride", "head_stride")
    types = {
        **dict.fromkeys(("x", "weight", "output"), "*bf16"),
        **dict.fromkeys(("num_rows", *integers), "i32"),
    }
    tile = HEADS_TILE
    constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    kernel = products.head_product
    return Variant("head_product_bf16", kernel, types, constants, options, multiples=integers)


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
        shrink = {**blocks, "BLOCK_K": lora.block_of_inner(ELEMENT_BYTES[dtype])}
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
            {"BLOCK": TILE_TOKENS},
            {"num_warps": 4},
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
            {"BLOCK": TILE_TOKENS},
            exact,
        )


def _truncation_variants() -> Iterator[Variant]:
    """Yield the launches of a search for floors, of 63 tiles."""
    types = {
        **dict.fromkeys(("row_best", "temperatures", "min_scores", "floors"), "*fp32"),
        **dict.fromkeys(("tile_best", "partials"), "*fp32"),
        **dict.fromkeys(("top_p", "weights_above", "targets", "weights_before"), "*fp64"),
        **dict.fromkeys(("above_keys", "last_keys", "candidates", "num_candidates"), "*i32"),
        **dict.fromkeys(("stride", "vocab_size", "num_tiles"), "i32"),
        "top_k": "*i64",
    }
    blocks = {"BLOCK": TILE_TOKENS, "BLOCK_TILES": 64}
    exact = {"num_warps": 8, "enable_fp_fusion": False}
    for dtype in ("fp32", "bf16"):
        logits = {"logits": f"*{dtype}", **types}
        for name, kernel, constants in (
            *(
                (f"narrow_floors_{turn}", truncation_rounds.narrow_floors, {"ROUND": turn})
                for turn in range(3)
            ),
            ("gather_candidates", truncation_rounds.gather_candidates, {"ROUND": 2}),
            ("truncation_floors", truncation.truncation_floors, {}),
        ):
            yield Variant(f"{name}_{dtype}", kernel, logits, {**blocks, **constants}, exact)


def _children_variants() -> Iterator[Variant]:
    """Yield the best tokens of tiles and of rows, with noise and without, and their trees."""
    types = {
        **dict.fromkeys(("keys", "seeds", "choices", "positions", "token_ids"), "*i64"),
        **dict.fromkeys(("sums", "tile_best", "row_best", "temperatures", "floors"), "*fp32"),
        "is_invalid": "*i32",
        "confidences": "*fp64",
        **dict.fromkeys(("stride", "vocab_size", "num_tiles", "num_children"), "i32"),
    }
    exact = {"num_warps": 8, "enable_fp_fusion": False}
    for dtype, is_noisy, count in (("fp32", True, 32), ("bf16", True, 32), ("bf16", False, 12)):
        constants = {"NOISY": is_noisy, "COUNT": count}
        name = f"{dtype}{'_noise' if is_noisy else ''}"
        logits = {"logits": f"*{dtype}", **types}
        tile = {**constants, "BLOCK": TILE_TOKENS}
        yield Variant(f"tile_children_{name}", children.tile_children, logits, tile, exact)
        if dtype == "bf16":
            blocks = {"BLOCK_COUNT": power_of_two(count), "BLOCK_TILES": 64}
            merged = {**constants, "NUM_WEIGHED": 32, **blocks}
            options = {"num_warps": 1}
            yield Variant(f"merge_children_{name}", children.merge_children, types, merged, options)
    types = {
        "log_survival": "*fp64",
        **dict.fromkeys(("num_nodes", "counts", "parents", "depths", "ranks"), "*i64"),
        **dict.fromkeys(("depth", "num_children", "max_nodes"), "i32"),
    }
    blocks = {"BLOCK": 128, "BLOCK_DEPTH": 16}
    yield Variant("best_first", best_first.best_first, types, blocks, {"num_warps": 1})


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
    words = (
        *("sampled", "draft_ids", "parents", "num_nodes", "num_kept", "token_ids", "num_tokens"),
        *("places", "bases", "block_tables", "tables"),
    )
    types = {
        **dict.fromkeys(words, "*i64"),
        **dict.fromkeys(("sources", "targets"), "*i32"),
        "is_invalid": "*i1",
        **dict.fromkeys(("draft_stride", "parent_stride", "nodes_stride", "kept_stride"), "i32"),
        **dict.fromkeys(("max_nodes", "table_stride", "num_moves"), "i32"),
    }
    one_warp = {"num_warps": 1}
    for block in (8, 64):
        places = 2 * block  # the base too
        yield Variant(f"walk_tree_{places}", verify.walk_tree, types, {"BLOCK": places}, one_warp)
        constants = {"BLOCK": block, "PAGE": 16}
        yield Variant(f"path_moves_{block}", verify.path_moves, types, constants, one_warp)
    moved = {**types, "kv_cache": "*bf16", "layer_stride": "i64"}
    constants = {"SIZE": 2048, "BLOCK": 1024}
    yield Variant("move_slots_bf16", verify.move_slots, moved, constants, {"num_warps": 4})


def _lookup_variants() -> Iterator[Variant]:
    """Yield prompt lookup, with the n-grams of the default configuration and the longest ones."""
    types = {
        **dict.fromkeys(("token_ids", "scores"), "*i32"),
        **dict.fromkeys(("texts", "lengths", "num_wanted", "drafts"), "*i64"),
        **dict.fromkeys(("size", "num_parts", "num_tokens"), "i32"),
    }
    for shortest, longest in ((2, 4), (1, 16)):
        constants = {"SHORTEST": shortest, "LONGEST": longest, "BLOCK": lookups.BLOCK}
        name = f"find_matches_{shortest}_{longest}"
        yield Variant(name, ngram.find_matches, types, constants, {"num_warps": 4})
    copied = {"BLOCK_PARTS": lookups.MAX_PARTS, "BLOCK": 8}
    yield Variant("copy_continuations_8", ngram.copy_continuations, types, copied, {"num_warps": 1})
