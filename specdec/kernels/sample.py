"""Which token a row of logits gives: on a CPU in C++, beside torch's best token for elsewhere.

How tokens are drawn is defined by `specdec.sampling`, whose torch code decides whatever a kernel
here leaves open.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.cpu import MatrixStruct, SharedMemory, native_library

DRAW = np.dtype(
    [
        ("top_p", np.float64),  # 1: uncut
        ("seed", np.int64),
        ("row", np.int64),  # of the logits
        ("top_k", np.int64),  # 0: uncut
        ("temperature", np.float32),  # 0: the best token
        ("min_score", np.float32),  # the logarithm of min_p; -inf: uncut
        ("choice", np.uint32),
        ("position", np.uint32),
    ]
)
"""How a row is drawn from; the struct `Draw` of native/draws.cpp."""

Draws = NDArray[np.void]
"""Some of DRAW."""


@dataclass(frozen=True)
class Peaks:
    """The best logit of each row, and the first token that has it; a row of -inf gives token 0.

    NaN counts as -inf. is_broken: whether a row holds NaN or +inf.
    """

    values: Tensor  # [num_rows] float32
    token_ids: Tensor  # [num_rows] int64
    is_broken: Tensor  # [num_rows] bool

    def __len__(self) -> int:
        return len(self.values)

    @property
    def bad_rows(self) -> list[bool]:
        """Of each row, whether no token can be drawn from it: it is broken, or all -inf."""
        rows = zip(self.is_broken.tolist(), self.values.tolist(), strict=True)
        return [is_broken or value == -torch.inf for is_broken, value in rows]

    def take(self, rows: Tensor) -> Peaks:
        """Of some rows; rows: int64."""
        return Peaks(self.values[rows], self.token_ids[rows], self.is_broken[rows])

    def with_rows(self, rows: Sequence[int], others: Peaks) -> Peaks:
        """The same but for `rows`, which are now `others`, in order."""
        values, token_ids, is_broken = (
            torch.index_copy(own, 0, torch.tensor(rows, device=own.device), new)
            for own, new in (
                (self.values, others.values),
                (self.token_ids, others.token_ids),
                (self.is_broken, others.is_broken),
            )
        )
        return Peaks(values, token_ids, is_broken)


def row_peaks(logits: Tensor) -> Peaks:
    """Of logits [num_rows, num_tokens], of any float type; reads them once."""
    library = _library() if logits.device.type == "cpu" else None
    if library is None:
        return torch_row_peaks(logits)
    logits, is_bfloat16 = _readable(logits)
    num_rows, num_tokens = logits.shape
    peaks = _unknown_peaks(num_rows)
    library.specdec_argmax(
        logits.data_ptr(),
        is_bfloat16,
        num_rows,
        logits.stride(0),
        num_tokens,
        peaks.values.data_ptr(),
        peaks.token_ids.data_ptr(),
        peaks.is_broken.data_ptr(),
    )
    return peaks


def product_peaks(head: MatrixStruct, hidden: Tensor) -> tuple[Tensor, Peaks]:
    """The products of rows with a packed matrix [num_tokens, size], and their peaks, on the CPU.

    hidden: [num_rows, size] float32, with rows that are contiguous. Returns [num_rows, num_tokens].
    """
    assert hidden.device.type == "cpu"
    assert hidden.dtype == torch.float32
    assert hidden.stride(1) == 1
    assert hidden.shape[1] == head.in_features
    num_rows = len(hidden)
    logits = torch.empty(num_rows, head.out_features, device="cpu")
    peaks = _unknown_peaks(num_rows)
    if not _library().specdec_gemm_argmax(
        head,
        hidden.data_ptr(),
        hidden.stride(0),
        num_rows,
        logits.data_ptr(),
        torch.get_num_threads(),
        peaks.values.data_ptr(),
        peaks.token_ids.data_ptr(),
        peaks.is_broken.data_ptr(),
    ):
        raise MemoryError(f"no memory to multiply {num_rows} rows")
    return logits, peaks


def peaks_of_ranks(peaks: Peaks, shared_memory: SharedMemory, first_token: int) -> Peaks:
    """`whole_peaks` of ranks that share memory. Raises RuntimeError once a peer is lost."""
    whole = Peaks(peaks.values.clone(), peaks.token_ids.clone(), peaks.is_broken.clone())
    if not _library().specdec_all_ranks_argmax(
        shared_memory.communicator,
        first_token,
        len(whole),
        whole.values.data_ptr(),
        whole.token_ids.data_ptr(),
        whole.is_broken.data_ptr(),
    ):
        shared_memory.check()
    return whole


def _unknown_peaks(num_rows: int) -> Peaks:
    return Peaks(
        torch.empty(num_rows, dtype=torch.float32, device="cpu"),
        torch.empty(num_rows, dtype=torch.int64, device="cpu"),
        torch.empty(num_rows, dtype=torch.bool, device="cpu"),
    )


def torch_row_peaks(logits: Tensor) -> Peaks:
    """The reference of `row_peaks`."""
    if logits.dtype == torch.float64:
        logits = logits.float()
    is_broken = ~(logits.amax(1) < torch.inf)  # as NaN counts as the highest there
    if is_broken.any():
        logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = logits.argmax(1)
    return Peaks(logits.gather(1, best.unsqueeze(1)).squeeze(1).float(), best, is_broken)


def draw_tokens(logits: Tensor, draws: Draws) -> NDArray[np.int64] | None:
    """A token for each of `draws`, or -1 where rounding might decide and the reference has to.

    logits: [num_rows, num_tokens], of the whole vocabulary and any float type. None where they are
    not on a CPU, or there is no compiler for it.
    """
    library = _library() if logits.device.type == "cpu" else None
    if library is None:
        return None
    assert draws.dtype == DRAW, draws.dtype
    logits, is_bfloat16 = _readable(logits)
    draws = np.ascontiguousarray(draws)
    token_ids = np.empty(len(draws), dtype=np.int64)
    library.specdec_sample(
        logits.data_ptr(),
        is_bfloat16,
        logits.stride(0),
        logits.shape[1],
        draws.ctypes.data,
        len(draws),
        token_ids.ctypes.data,
    )
    return token_ids


def _readable(logits: Tensor) -> tuple[Tensor, bool]:
    """In a type that the kernels know, each row in one piece; and whether that is bfloat16."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return logits, logits.dtype == torch.bfloat16


@cache
def _library() -> Any:
    """The compiled kernels with the types of their arguments; None without a compiler."""
    library = native_library()
    if library is not None:
        address, flag, count = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        library.specdec_argmax.argtypes = [
            *(address, flag, count, count, count),
            *(address, address, address),
        ]
        library.specdec_argmax.restype = None
        library.specdec_gemm_argmax.argtypes = [
            *(ctypes.POINTER(MatrixStruct), address, count, count, address, flag),
            *(address, address, address),
        ]
        library.specdec_gemm_argmax.restype = ctypes.c_bool
        library.specdec_all_ranks_argmax.argtypes = [
            *(address, count, count),
            *(address, address, address),
        ]
        library.specdec_all_ranks_argmax.restype = ctypes.c_bool
        library.specdec_sample.argtypes = [address, flag, count, count, address, count, address]
        library.specdec_sample.restype = None
    return library
