"""Attention, with the constants of common models, as it is launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from specdec.config.gpu.attention_splits import ENOUGH_PROGRAMS, heads_per_program, short_tiles
from specdec.kernels.triton.attention import block_of_keys, stages_of, warps_of_tile
from specdec.kernels.triton.device import attention, store_kv
from tools.gpu_kernels.variant import ARCHITECTURES, ELEMENT_BYTES, Variant, power_of_two

_SHAPES = {64: (9, 3), 80: (32, 32), 96: (32, 32), 128: (32, 8), 256: (16, 8)}
"""Query and KV heads by head size: SmolLM2, Phi-2, Phi-3-mini, Llama-3.1-8B, Gemma-2-9B."""
_LARGEST_KV = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_LATENT = (64, 512)
"""Rotated dimensions and rank of DeepSeek."""
_LATENT_HEADS = {16: 16, 32: 128, 64: 128}
"""Query heads by the rows of a tile: of V2-Lite and of V3."""


def attention_variants() -> Iterator[Variant]:
    """Yield attention, its merge, and the write of keys and values."""
    for head_dim in _SHAPES:
        yield _attention(head_dim, 16, "parts")
        yield _attention(head_dim, 16, "parts", num_programs=ENOUGH_PROGRAMS)
        for tile in (16, 32, 64):
            yield _attention(head_dim, tile, "segments")
        yield _attention(head_dim, 64, "whole")
        yield _attention(head_dim, 64, "whole", num_programs=1)
        yield _attention(head_dim, 64, "whole", is_ragged=True)
        yield _merge(head_dim)
        yield _store(head_dim)
    yield _attention(128, 64, "parts", has_trees=True)
    yield _attention(128, 64, "segments", num_ahead=15)
    yield _attention(128, 64, "parts", num_ahead=15)
    yield _attention(128, 16, "parts", has_cap=True)
    yield _attention(128, 16, "parts", dtype="fp16")
    yield _attention(64, 16, "parts", dtype="fp32")
    for head_dim in (64, 128, 256):
        yield _attention(head_dim, short_tiles(head_dim, 4)[-1], "whole", dtype="fp32")
    yield _attention(128, 16, "parts", kv_dtype="fp8e4nv", architectures=(90,))
    yield _attention(128, 64, "whole", kv_dtype="fp8e4nv", architectures=(90,))
    yield _store(128, kv_dtype="fp8e4nv", architectures=(90,))
    yield _attention(128, 16, "parts", kv_dtype="fp8e5")
    yield _attention(128, 64, "whole", kv_dtype="fp8e5")
    yield _store(128, kv_dtype="fp8e5")
    yield _store(128, has_norm=True)
    yield _attention(64, 16, "parts", has_sinks=True)
    yield _attention(64, 64, "whole", has_sinks=True)
    yield _merge(64, has_sinks=True)
    yield from _latent_variants()


def _latent_variants() -> Iterator[Variant]:
    """Yield attention over latents, with tiles of 16 heads (V2-Lite) and 32 (V3)."""
    yield _of_latents(_attention(128, 16, "parts"))
    yield _of_latents(_attention(128, 32, "parts"))
    yield _of_latents(_attention(128, 32, "parts", has_trees=True))
    yield _of_latents(_attention(128, 32, "segments"))
    yield _of_latents(_attention(128, 64, "whole"))
    yield _of_latents(_attention(128, 64, "whole", num_programs=1))
    yield _of_latents(_attention(128, 16, "parts", dtype="fp16"))
    yield _of_latents(_attention(128, 16, "parts", dtype="fp32"))
    yield _of_latents(_attention(128, 32, "parts", kv_dtype="fp8e4nv", architectures=(90,)))
    yield _of_latents(_attention(128, 32, "parts", kv_dtype="fp8e5"))
    yield _of_latents(_merge(128))
    store = _store(128)
    rotary, rank = _LATENT
    own = {
        **{"NUM_HEADS": _LATENT_HEADS[64], "KV_HEADS": 1, "KV_PARTS": 1, "HEAD_DIM": rotary + rank},
        **{"ROTARY_DIM": rotary, "BLOCK_D": power_of_two(rotary + rank)},
    }
    name = store.name.replace("d128", f"latent{rank}")
    yield replace(store, name=name, constants={**store.constants, **own})


def _of_latents(variant: Variant) -> Variant:
    """Return a variant of attention, or of its merge, for latents that all heads share."""
    rotary, rank = _LATENT
    tile, constants = variant.constants["BLOCK_M"], dict(variant.constants)
    assert isinstance(tile, int)
    group = heads_per_program(heads := _LATENT_HEADS[tile])
    constants |= {"NUM_HEADS": heads, "KV_HEADS": heads // group, "GROUP": group}
    constants |= {"VALUE_DIM": rank, "BLOCK_D": rank}
    options = dict(variant.options)
    if "BLOCK_N" in constants:
        size = ELEMENT_BYTES[variant.types["query"].removeprefix("*")]
        constants |= {"HEAD_DIM": rotary + rank, "ROTARY_DIM": rotary, "BLOCK_R": rotary}
        constants["BLOCK_N"] = block_of_keys(rank, size)
        options["num_warps"] = warps_of_tile(tile, rank, size)
    name = variant.name.replace("d128", f"latent{rank}")
    return replace(variant, name=name, constants=constants, options=options)


def _attention(
    head_dim: int,
    tile: int,
    context: Literal["whole", "segments", "parts"],
    *,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    has_trees: bool = False,
    has_cap: bool = False,
    has_sinks: bool = False,
    is_ragged: bool = False,
    num_ahead: int = 0,
    num_programs: int | None = None,
    architectures: tuple[int, ...] = ARCHITECTURES,
) -> Variant:
    """Return attention with a context as a whole, by segments, or with a part for each segment.

    is_ragged: whether the batch is a RaggedBatch, for contexts as a whole. num_ahead: as in
    `plan_on_device`, of a block of drafts. num_programs: of the launch; by default few with parts
    and many otherwise.
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
        "sinks": f"*{dtype}",
        **dict.fromkeys(integers, "i32"),
        **dict.fromkeys(floats, "fp32"),
    }
    block_d = power_of_two(head_dim)
    constants = {
        **_heads_of(head_dim),
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": 0,
        "BLOCK_R": 16,
        "PAGE": 16,
        "BLOCK_M": tile,
        "BLOCK_N": block_of_keys(block_d, ELEMENT_BYTES[dtype]),
        "HAS_TREES": has_trees,
        "HAS_CAP": has_cap,
        "NUM_AHEAD": num_ahead,
        "HAS_SINKS": has_sinks,
        "HAS_SEGMENTS": context != "whole",
        "HAS_PARTS": has_parts,
    }
    marks = [dtype, *([kv_dtype] if kv_dtype != dtype else []), f"d{head_dim}", f"m{tile}"]
    marks += [context, *(["trees"] if has_trees else []), *(["cap"] if has_cap else [])]
    marks += ["sinks"] if has_sinks else []
    marks += ["ragged"] if is_ragged else []
    marks += ["block"] if num_ahead else []
    if num_programs is not None:
        marks += ["few" if num_programs < ENOUGH_PROGRAMS else "many"]
    else:
        num_programs = 1 if has_parts else ENOUGH_PROGRAMS
    num_stages = stages_of(
        num_programs, ELEMENT_BYTES[dtype], merges_segments=context == "segments"
    )
    num_warps = warps_of_tile(tile, block_d, ELEMENT_BYTES[dtype])
    options = {"num_warps": num_warps, "num_stages": num_stages}
    name = "_".join(["paged_attention", *marks])
    return Variant(name, attention.paged_attention, types, constants, options, architectures)


def _merge(head_dim: int, *, has_sinks: bool = False) -> Variant:
    types = {
        **dict.fromkeys(("partial", "statistics"), "*fp32"),
        "output": "*bf16",
        **dict.fromkeys(("tile_sequences", "tile_tokens", "cu_seqlens"), "*i32"),
        "context_lens": "*i64",
        "sinks": "*bf16",
        **dict.fromkeys(("num_segments", "part_rows"), "i32"),
        "value_scale": "fp32",
    }
    constants = {**_heads_of(head_dim), "BLOCK_M": 16, "BLOCK_ROWS": 4, "HAS_SINKS": has_sinks}
    name = f"merge_segments_bf16_d{head_dim}{'_sinks' if has_sinks else ''}"
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
        "KV_PARTS": 2,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": head_dim,
        "BLOCK_D": power_of_two(head_dim),
        "BLOCK_H": 4,
        "ROTATES": True,
        "HAS_NORM": has_norm,
        "LARGEST": _LARGEST_KV.get(kv_dtype, 0.0),
    }
    name = f"rotate_and_store_{kv_dtype}_d{head_dim}{'_norm' if has_norm else ''}"
    options = {"num_warps": 4}
    return Variant(name, store_kv.rotate_and_store, types, constants, options, architectures)


def _heads_of(head_dim: int) -> dict[str, object]:
    heads, kv_heads = _SHAPES[head_dim]
    return {
        "NUM_HEADS": heads,
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "FIRST_HEAD": 0,
        "VALUE_DIM": head_dim,
        "BLOCK_D": power_of_two(head_dim),
    }
