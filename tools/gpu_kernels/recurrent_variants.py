"""Recurrent layers, for the shapes of Qwen3-Next, Kimi Linear, Nemotron-H, Falcon-H1, LFM2, Jamba.

`DeltaRule`'s columns are arguments, so that one binary serves all layers of a shape.
"""

from __future__ import annotations

from collections.abc import Iterator

from specdec.kernels.triton.device import recurrence as kernels
from specdec.kernels.triton.recurrence import (
    BLOCK_TOKENS,
    SCAN_CHANNELS,
    columns_of,
    memory_tile,
)
from tools.gpu_kernels.variant import Variant, power_of_two

_MAX_GUESSES = 8
_RULES = {
    "qwen3_next": (128, 128, {"NORMALIZES": True, "HAS_SHARE": True}),
    "olmo_hybrid": (96, 192, {"NORMALIZES": True, "HAS_SHARE": True}),
    "kimi_linear": (128, 128, {"NORMALIZES": True, "HAS_SHARE": True, "BY_CHANNEL": True}),
    "nemotron_h": (128, 64, {"HAS_SKIP": True}),
    "falcon_h1": (256, 128, {"HAS_SKIP": True}),
}
"""Sizes of keys and values, and what the rule has."""


def recurrent_variants() -> Iterator[Variant]:
    """Yield convolutions, rules, the scan, and norms of heads."""
    for dtype, window, guesses, activates in (
        ("bf16", 3, _MAX_GUESSES, True),
        ("bf16", 3, 0, True),
        ("bf16", 3, 32, True),
        ("bf16", 2, _MAX_GUESSES, False),
        ("fp16", 3, _MAX_GUESSES, True),
        ("fp32", 3, _MAX_GUESSES, True),
    ):
        yield _convolution(dtype, window, guesses, activates=activates)
    for name in _RULES:
        yield _rule(name)
    yield _scan()
    for name, rounds, is_silu in (("delta", True, True), ("kimi", False, False)):
        yield _gate(name, rounds=rounds, is_silu=is_silu)


def _convolution(dtype: str, window: int, guesses: int, *, activates: bool) -> Variant:
    block_s = power_of_two(window + guesses)
    integers = ("stride", "num_inputs", "first_channel", "num_channels")
    types = {
        **dict.fromkeys(("inputs", "pool", "weight", "bias"), f"*{dtype}"),
        "mixed": "*fp32",
        "spans": "*i64",
        **dict.fromkeys(integers, "i32"),
    }
    constants = {
        "WINDOW": window,
        "MAX_GUESSES": guesses,
        "HAS_BIAS": not activates,
        "ACTIVATES": activates,
        "BLOCK_T": BLOCK_TOKENS,
        "BLOCK_S": block_s,
        "BLOCK": columns_of(block_s),
    }
    name = f"convolve_{dtype}_w{window}_g{guesses}"
    return Variant(
        name, kernels.convolve, types, constants, {"num_warps": 4}, multiples=integers[:2]
    )


def _rule(name: str) -> Variant:
    key_dim, value_dim, own = _RULES[name]
    columns = ("query_at", "key_at", "value_at", "decay_at", "share_at")
    types = {
        **dict.fromkeys(("mixed", "memory", "output", "rate", "bias", "skip"), "*fp32"),
        "spans": "*i64",
        **dict.fromkeys(("num_inputs", *columns, "first_head", "heads_per_key"), "i32"),
        **dict.fromkeys(("query_scale", "share_scale"), "fp32"),
    }
    block_k, block_v = memory_tile(key_dim, value_dim)
    flags = dict.fromkeys(("NORMALIZES", "HAS_SHARE", "HAS_SKIP", "BY_CHANNEL"), False)
    sizes = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "MAX_GUESSES": _MAX_GUESSES}
    constants = {**sizes, **flags, **own, "BLOCK_K": block_k, "BLOCK_V": block_v}
    kernel = kernels.run_delta
    return Variant(f"run_delta_{name}", kernel, types, constants, {"num_warps": 4})


def _scan() -> Variant:
    """Return the scan of Jamba."""
    types = {
        **dict.fromkeys(("mixed", "memory", "output", "rate", "skip"), "*fp32"),
        **dict.fromkeys(("steps", "keys", "queries"), "*bf16"),
        "spans": "*i64",
        "num_channels": "i32",
    }
    sizes = {"STATE_DIM": 16, "MAX_GUESSES": _MAX_GUESSES, "BLOCK_S": 16, "BLOCK": SCAN_CHANNELS}
    options = {"num_warps": 4}
    return Variant(
        "run_scan_bf16", kernels.run_scan, types, sizes, options, multiples=("num_channels",)
    )


def _gate(name: str, *, rounds: bool, is_silu: bool) -> Variant:
    types = {
        "found": "*fp32",
        **dict.fromkeys(("gates", "weight", "output"), "*bf16"),
        "stride": "i32",
        "eps": "fp32",
    }
    constants = {"SIZE": 128, "BLOCK": 128, "ROUNDS": rounds, "IS_SILU": is_silu}
    return Variant(f"gate_heads_{name}", kernels.gate_heads, types, constants, {"num_warps": 1})
