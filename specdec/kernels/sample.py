"""Argmax and sampling of rows of logits on CPUs, by kernels in C++, and the argmax in torch.

`specdec.sampling` defines how tokens are sampled. Its torch code samples the rows for which a
kernel here returns no token.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.cpu import MatrixStruct, SharedMemory, native_library
from specdec.kernels.cpu.build import declare
from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS, RowArgmax, SampleParams


def row_argmax(logits: Tensor) -> RowArgmax:
    """Return the argmax of each row, in one pass.

    logits: [num_rows, num_tokens], of any floating-point type.
    """
    logits, is_bfloat16 = _kernel_input(logits)
    num_rows, num_tokens = logits.shape
    argmax = _empty_argmax(num_rows)
    _library().specdec_argmax(
        logits.data_ptr(),
        is_bfloat16,
        num_rows,
        logits.stride(0),
        num_tokens,
        torch.get_num_threads(),
        *argmax.addresses,
    )
    return argmax


def logits_and_argmax(head: MatrixStruct, hidden: Tensor) -> tuple[Tensor, RowArgmax]:
    """Compute logits by a packed output head [num_tokens, hidden_size], and their argmax, on CPU.

    hidden: [num_rows, hidden_size] float32 with contiguous rows. Returns logits
    [num_rows, num_tokens] and the argmax of each row.
    """
    assert hidden.device.type == "cpu"
    assert hidden.dtype == torch.float32
    assert hidden.stride(1) == 1
    assert hidden.shape[1] == head.in_features
    num_rows = len(hidden)
    logits = torch.empty(num_rows, head.out_features, device="cpu")
    argmax = _empty_argmax(num_rows)
    if not _library().specdec_gemm_argmax(
        head,
        hidden.data_ptr(),
        hidden.stride(0),
        num_rows,
        logits.data_ptr(),
        torch.get_num_threads(),
        *argmax.addresses,
    ):
        raise MemoryError(f"no memory to multiply {num_rows} rows")
    return logits, argmax


def shared_memory_argmax(
    argmax: RowArgmax, shared_memory: SharedMemory, first_token: int
) -> RowArgmax:
    """Return the argmax over all vocabulary shards, of ranks that share memory.

    argmax: of this rank's shard, whose first token is first_token. Raises RuntimeError when a peer
    is lost.
    """
    whole = RowArgmax(argmax.values.clone(), argmax.token_ids.clone(), argmax.has_nan.clone())
    if not _library().specdec_all_ranks_argmax(
        shared_memory.communicator,
        first_token,
        len(whole),
        *whole.addresses,
    ):
        shared_memory.check()
    return whole


def _empty_argmax(num_rows: int) -> RowArgmax:
    return RowArgmax(
        torch.empty(num_rows, dtype=torch.float32, device="cpu"),
        torch.empty(num_rows, dtype=torch.int64, device="cpu"),
        torch.empty(num_rows, dtype=torch.bool, device="cpu"),
    )


def torch_row_argmax(logits: Tensor) -> RowArgmax:
    """Return the argmax of each row, the first of equals: the definition, which reads no value."""
    has_nan = ~(logits.amax(1) < torch.inf)  # amax propagates NaN
    values = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = values.argmax(1)
    return RowArgmax(values.gather(1, best.unsqueeze(1)).squeeze(1), best, has_nan)


def sample_tokens(logits: Tensor, params: SampleParams) -> NDArray[np.int64]:
    """Sample a token for each of `params`; -1 where rounding might matter, for the reference.

    logits: [num_rows, num_tokens], of the whole vocabulary and any floating-point type. Returns
    [len(params)].
    """
    assert params.dtype == SAMPLE_PARAMS, params.dtype
    logits, is_bfloat16 = _kernel_input(logits)
    params = np.ascontiguousarray(params)
    token_ids = np.empty(len(params), dtype=np.int64)
    _library().specdec_sample(
        logits.data_ptr(),
        is_bfloat16,
        logits.stride(0),
        logits.shape[1],
        params.ctypes.data,
        len(params),
        token_ids.ctypes.data,
        torch.get_num_threads(),
    )
    return token_ids


def best_drafts(
    logits: Tensor, target_ids: Tensor, params: SampleParams, count: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` draft tokens of each row with the largest perturbed scores, best first.

    logits: [num_rows, num_tokens], of any floating-point type. target_ids: the target's id of each
    draft token, [num_tokens] int32, ascending. params: of the rows in order, with temperatures
    above 0. Returns scores (log q of an unknown normalization, and the noise) in float32, -inf
    where a row has no more tokens, and the target's ids in int64. Rounding may decide.
    """
    assert params.dtype == SAMPLE_PARAMS, params.dtype
    assert target_ids.dtype == torch.int32
    logits, is_bfloat16 = _kernel_input(logits)
    params = np.ascontiguousarray(params)
    scores = torch.full((len(params), count), -torch.inf, device="cpu")
    token_ids = torch.zeros(len(params), count, dtype=torch.int64, device="cpu")
    _library().specdec_best_drafts(
        logits.data_ptr(),
        is_bfloat16,
        logits.stride(0),
        logits.shape[1],
        target_ids.data_ptr(),
        params.ctypes.data,
        len(params),
        count,
        scores.data_ptr(),
        token_ids.data_ptr(),
        torch.get_num_threads(),
    )
    return scores, token_ids


def _kernel_input(logits: Tensor) -> tuple[Tensor, bool]:
    """Return logits in float32 or bfloat16 with contiguous rows, and whether that is bfloat16.

    logits: [num_rows, num_tokens].
    """
    assert logits.device.type == "cpu", logits.device
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return logits, logits.dtype == torch.bfloat16


@cache
def _library() -> Any:
    """Return the kernels with argument and result types."""
    library = native_library()
    assert library is not None, "the operations were selected without their library"
    address, flag, count = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    argmax = (address, address, address)
    head = ctypes.POINTER(MatrixStruct)
    declare(
        library,
        argmax=(None, address, flag, count, count, count, flag, *argmax),
        gemm_argmax=(ctypes.c_bool, head, address, count, count, address, flag, *argmax),
        all_ranks_argmax=(ctypes.c_bool, address, count, count, *argmax),
        sample=(None, address, flag, count, count, address, count, address, flag),
        best_drafts=(
            *(None, address, flag, count, count, address),
            *(address, count, count, address, address, flag),
        ),
    )
    return library
