"""Draft trees that grow best first on a GPU; `specdec.kernels.best_first` defines them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.triton.device import best_first as kernels


def best_first(
    log_survival: Tensor, num_nodes: Tensor, max_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the columns of `BestFirstTrees`, in one launch; arguments as `torch_best_first`."""
    num_rows, depth, num_children = log_survival.shape
    counts = torch.empty_like(num_nodes)
    parents, depths, ranks = (num_nodes.new_empty(num_rows, max_nodes) for _ in range(3))
    kernels.best_first[(num_rows,)](
        log_survival.contiguous(),
        num_nodes.contiguous(),
        counts,
        parents,
        depths,
        ranks,
        depth,
        num_children,
        max_nodes,
        BLOCK=max(2, triton.next_power_of_2(1 + max_nodes)),
        BLOCK_DEPTH=max(2, triton.next_power_of_2(depth)),
        num_warps=1,
    )
    return counts, parents, depths, ranks
