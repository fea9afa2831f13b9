"""Recurrent layers as structs of the native kernels: Python bindings of the folder `recurrence`."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_int32, c_int64
from enum import IntEnum

from specdec.kernels.cpu.matrix import FORMATS
from specdec.kernels.reference.forward_batch import ForwardBatch
from specdec.kernels.reference.state_pool import StatePool

_Address = ctypes.c_void_p


class RecurrenceKind(IntEnum):
    """The kinds of recurrent layers; the values of `RecurrenceKind` in recurrence.h."""

    NONE = 0
    SHORT_CONVOLUTION = 1
    GATED_DELTA = 2
    STATE_SPACE = 3


class RecurrentShapeStruct(ctypes.Structure):
    """`RecurrentShape` in recurrence.h; kind is NONE without recurrent layers."""

    _fields_ = (
        ("kind", c_int32),
        *((name, c_int64) for name in ("num_layers", "kernel_size", "num_channels")),
        *((name, c_int64) for name in ("num_heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("num_keys", "heads_per_key", "first_head")),
    )


class RecurrentWeightsStruct(ctypes.Structure):
    """`RecurrentWeights` in recurrence.h, in float32."""

    _fields_ = (
        *((name, _Address) for name in ("taps", "convolution_bias", "decay_rates")),
        *((name, _Address) for name in ("step_biases", "skips", "norm")),
    )


class StatePoolStruct(ctypes.Structure):
    """`StatePool` in states.h."""

    _fields_ = (
        *((name, _Address) for name in ("inputs", "memory")),
        ("format", c_int32),
        *((name, c_int64) for name in ("num_slots", "slot_size")),
        ("spans", _Address),
    )


class PassStates:
    """The states of a pass in the memory layout of states.h; the pool must outlive it."""

    def __init__(self, pool: StatePool, batch: ForwardBatch) -> None:
        """Plan the pass, which commits states."""
        spans = array("q")
        for span in pool.plan(batch).spans:
            spans.extend((span.slot, span.num_replayed, span.num_known, span.num_kept))
        self._spans, (_, num_slots, slot_size, _) = spans, pool.inputs.shape
        self.struct = StatePoolStruct(
            pool.inputs.data_ptr(),
            pool.memory.data_ptr(),
            FORMATS[pool.inputs.dtype],
            num_slots,
            slot_size,
            spans.buffer_info()[0],
        )
