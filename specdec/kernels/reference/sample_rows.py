"""Input and output of samplers: parameters of rows of logits, and their argmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_PARAMS = np.dtype(
    [
        ("top_p", np.float64),  # 1: off
        ("seed", np.int64),
        ("row", np.int64),  # of the logits
        ("top_k", np.int64),  # 0: off
        ("temperature", np.float32),  # 0: greedy
        ("min_score", np.float32),  # log(min_p); -inf: off
        ("choice", np.uint32),
        ("position", np.uint32),
    ]
)
"""Sampling parameters of a row; the struct `SampleParams` in cpu/source/sampling/sampler.h."""

SampleParams = NDArray[np.void]
"""Array of SAMPLE_PARAMS records."""


class RowSampling(NamedTuple):
    """Sampling parameters of R rows of logits as kernels read them: contiguous columns."""

    temperatures: Tensor  # [R] float32; 0 for the argmax
    top_k: Tensor  # [R] int64; 0 for no limit
    top_p: Tensor  # [R] float64; 1 for no limit
    min_scores: Tensor  # [R] float32, log(min_p); -inf for no limit
    seeds: Tensor  # [R] int64
    choices: Tensor  # [R] int64
    positions: Tensor  # [R] int64

    @property
    def limits(self) -> tuple[Tensor, ...]:
        """Return what truncates the rows: the first four columns."""
        return self[:4]


@dataclass(frozen=True)
class RowArgmax:
    """Argmax of rows of logits: the largest logit, and the first token that has it.

    NaN counts as -inf; a row of -inf has token 0. has_nan: whether a row holds NaN or +inf.
    """

    values: Tensor  # [num_rows] float32
    token_ids: Tensor  # [num_rows] int64
    has_nan: Tensor  # [num_rows] bool

    def __len__(self) -> int:
        return len(self.values)

    @property
    def invalid_rows(self) -> list[bool]:
        """Return, for each row, whether no token can be sampled: NaN or +inf, or only -inf."""
        rows = zip(self.has_nan.tolist(), self.values.tolist(), strict=True)
        return [has_nan or value == -torch.inf for has_nan, value in rows]

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of the three columns, for the kernels."""
        return self.values.data_ptr(), self.token_ids.data_ptr(), self.has_nan.data_ptr()

    def take(self, rows: Tensor) -> RowArgmax:
        """Return the argmax of some rows; rows: [R] int64."""
        return RowArgmax(self.values[rows], self.token_ids[rows], self.has_nan[rows])

    def with_rows(self, rows: Sequence[int], others: RowArgmax) -> RowArgmax:
        """Return a copy in which `rows` are replaced by `others`, in order."""
        index = torch.tensor(rows, device=self.values.device)
        return RowArgmax(
            self.values.index_copy(0, index, others.values),
            self.token_ids.index_copy(0, index, others.token_ids),
            self.has_nan.index_copy(0, index, others.has_nan),
        )


Argmax = Callable[[Tensor], RowArgmax]
"""Function of rows of logits, of any float type."""
