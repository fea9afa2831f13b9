"""LoRA adapters as structs of the native kernels: Python bindings of lora.h."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.kernels.cpu.matrix import MatrixStruct
from specdec.kernels.reference.forward_batch import AdapterRun

_Int = ctypes.c_int64


class LoraExpansionStruct(ctypes.Structure):
    """B of one projection, and its place in the result of A and in the layer's output."""

    _fields_ = (("weight", MatrixStruct), ("first_rank", _Int), ("first_output", _Int))


class LoraUpdateStruct(ctypes.Structure):
    """The update of one linear layer; without expansions none."""

    _fields_ = (
        ("shrink", MatrixStruct),
        ("expansions", ctypes.POINTER(LoraExpansionStruct)),
        ("num_expansions", _Int),
    )


class HeadUpdateStruct(ctypes.Structure):
    """The matrices B of one head in the update of the expansion of latents."""

    _fields_ = (("from_query", MatrixStruct), ("to_value", MatrixStruct))


class LatentUpdateStruct(ctypes.Structure):
    """The update of the expansion of latents, in its two halves; without heads none."""

    _fields_ = (
        ("from_latent", MatrixStruct),
        ("to_latent", MatrixStruct),
        ("heads", ctypes.POINTER(HeadUpdateStruct)),
    )


class LoraLayerStruct(ctypes.Structure):
    """The updates of one decoder layer."""

    _fields_ = (
        *((name, LoraUpdateStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, LoraUpdateStruct) for name in ("query_up", "fusion")),
        ("expansion", LatentUpdateStruct),
    )


class AdapterRunStruct(ctypes.Structure):
    """Consecutive tokens with the same adapter; width: as in LoraArrays."""

    _fields_ = (
        ("layers", ctypes.POINTER(LoraLayerStruct)),
        ("width", _Int),
        ("begin", _Int),
        ("end", _Int),
    )


@dataclass(frozen=True, eq=False)
class LoraArrays:
    """The layers of one adapter. width: the most products with A of a token in a layer.

    kept: what owns the memory that the structs point to.
    """

    layers: ctypes.Array[LoraLayerStruct]
    width: int
    kept: tuple[Any, ...] = ()


def run_structs(
    runs: Sequence[AdapterRun], adapters: Mapping[int, LoraArrays]
) -> ctypes.Array[AdapterRunStruct]:
    """Return the runs of a batch, without those of adapters that update no layer.

    `adapters` must hold those of all runs, and outlive the result. Raises KeyError for an adapter
    that is not loaded.
    """
    found = [(run, adapter) for run in runs if (adapter := adapters[run.adapter_id]).width]
    structs = (AdapterRunStruct * len(found))()
    for struct, (run, adapter) in zip(structs, found, strict=True):
        struct.layers = ctypes.cast(adapter.layers, ctypes.POINTER(LoraLayerStruct))
        struct.width, struct.begin, struct.end = adapter.width, run.begin, run.end
    return structs
