"""Logits of all Medusa heads in one call: Python bindings of medusa.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_bool, c_int32, c_int64

import torch
from torch import Tensor

from specdec.kernels.cpu.build import declare
from specdec.kernels.cpu.matrix import MatrixStruct

_Matrices = ctypes.POINTER(MatrixStruct)


class _MedusaStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("hidden_size", "num_heads", "num_layers")),
        ("layers", _Matrices),
        ("lm_heads", _Matrices),
        ("has_one_lm_head", c_int32),
    )


class MedusaKernel:
    """Medusa heads with equal numbers of layers, on one rank that holds them all."""

    def __init__(
        self,
        library: ctypes.CDLL,
        heads: Sequence[Sequence[MatrixStruct]],
        lm_heads: Sequence[MatrixStruct],
    ) -> None:
        """heads: the layers of each. lm_heads: one for each head, or one for all.

        The creator owns the memory that the matrices point to.
        """
        assert len(lm_heads) in (1, len(heads))
        declare(
            library,
            medusa=(c_bool, ctypes.POINTER(_MedusaStruct), *_arguments()),
        )
        self._library = library
        self._num_tokens = lm_heads[0].out_features
        layers = [layer for head in heads for layer in head]
        self._struct = _MedusaStruct(
            lm_heads[0].in_features,
            len(heads),
            len(heads[0]),
            (MatrixStruct * len(layers))(*layers),
            (MatrixStruct * len(lm_heads))(*lm_heads),
            len(lm_heads) == 1,
        )

    def logits(self, hidden: Tensor, count: int) -> Tensor:
        """Return the logits of the first `count` heads, [count, R, num_tokens] float32.

        hidden: [R, hidden_size] float32. Raises MemoryError when no scratch memory is available.
        """
        assert hidden.dtype == torch.float32
        assert hidden.shape[1] == self._struct.hidden_size
        assert 0 < count <= self._struct.num_heads
        hidden = hidden.contiguous()
        logits = torch.empty(count, len(hidden), self._num_tokens, device="cpu")
        if not self._library.specdec_medusa(
            self._struct,
            hidden.data_ptr(),
            len(hidden),
            count,
            logits.data_ptr(),
            torch.get_num_threads(),
        ):
            raise MemoryError(f"no memory for {len(hidden)} rows of Medusa heads")
        return logits


def _arguments() -> tuple[type, ...]:
    """Return the types of x, num_rows, count, logits, num_threads."""
    address = ctypes.c_void_p
    return address, c_int64, c_int64, address, c_int32
