"""Draft trees that grow best first, from the best tokens of each depth, by torch or C++.

DDTree (arXiv 2604.12989): a drafter that makes all tokens in one pass gives the tokens of a depth
whatever those before are. The *survival* of a node is the product of the probabilities along its
path, so the N nodes with the largest survival are the tree with the most expected accepted tokens.

Here the chain of best tokens comes first, so that a tree accepts at least what the chain does, and
then the nodes in the order of their survival. Of equal ones the shallower node comes first, then
the one with the lower parent, then the one with the lower rank.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.cpu import native_library
from specdec.kernels.cpu.build import declare

_LAST = torch.iinfo(torch.int64).max


class BestFirstTrees(NamedTuple):
    """Trees of B sequences; of each the first `counts` nodes, parents first, siblings best first.

    parents: -1 for the base. depths: from 1 up. ranks: of each token among those of its depth.
    After the nodes they are -1, 0 and 0.
    """

    counts: Tensor  # [B] int64
    parents: Tensor  # [B, N] int64
    depths: Tensor  # [B, N] int64
    ranks: Tensor  # [B, N] int64


def torch_best_first(log_survival: Tensor, num_nodes: Tensor, max_nodes: int) -> BestFirstTrees:
    """Return trees of up to `num_nodes` nodes: the definition, which reads no value.

    log_survival: [B, depth, num_children] float64, logarithms of the probabilities of the tokens
    of each depth, descending; -inf for no token. num_nodes: [B] int64. max_nodes: N, at least
    these.
    """
    num_rows, _, num_children = log_survival.shape
    places, width = torch.arange(1 + max_nodes, device=log_survival.device), num_children + 1
    # A place, that of the base or of a node, offers its next child: a cell of a table whose last
    # row and column have no token.
    table = pad(log_survival, (0, 1, 0, 1), value=-torch.inf).flatten(1)
    cells = num_nodes.new_zeros(num_rows, len(places))
    survival = log_survival.new_full(cells.shape, -torch.inf)
    survival[:, 0] = 0
    chain_lens = (log_survival[:, :, 0] > -torch.inf).long().cumprod(1).sum(1, keepdim=True)
    columns = list[Tensor]()
    for index in range(max_nodes):
        offers = survival + table.gather(1, cells)
        is_less = offers < offers.amax(1, keepdim=True)
        order = (cells // width * len(places) + places).masked_fill(is_less, _LAST)
        parent = torch.where(index < chain_lens, index, order.argmin(1, keepdim=True))
        value, cell = offers.gather(1, parent), cells.gather(1, parent)
        exists = (value > -torch.inf) & (index < num_nodes[:, None])
        survival[:, index + 1] = value.masked_fill(~exists, -torch.inf).squeeze(1)
        cells[:, index + 1] = ((cell // width + exists) * width).squeeze(1)
        cells.scatter_add_(1, parent, exists.long())
        columns.append(torch.cat([parent, cell // width + 1, cell % width], 1) * exists)
    places_of, depths, ranks = torch.stack(columns, 2).unbind(1)
    return BestFirstTrees((depths > 0).sum(1), places_of - 1, depths, ranks)


def best_first(log_survival: Tensor, num_nodes: Tensor, max_nodes: int) -> BestFirstTrees:
    """Return what `torch_best_first` does, on the host, by a kernel in C++."""
    assert log_survival.device.type == "cpu"
    assert log_survival.dtype == torch.float64
    log_survival, num_nodes = log_survival.contiguous(), num_nodes.contiguous()
    num_rows, depth, num_children = log_survival.shape
    trees = BestFirstTrees(
        torch.empty_like(num_nodes),
        *(num_nodes.new_empty(num_rows, max_nodes) for _ in range(3)),
    )
    _library().specdec_best_first(
        log_survival.data_ptr(),
        num_rows,
        depth,
        num_children,
        num_nodes.data_ptr(),
        max_nodes,
        *(column.data_ptr() for column in trees),
        torch.get_num_threads(),
    )
    return trees


@cache
def _library() -> Any:
    """Return the kernels with argument and result types."""
    library = native_library()
    assert library is not None, "the operations were selected without their library"
    address, count = ctypes.c_void_p, ctypes.c_int64
    sizes, columns = (count, count, count, address, count), (address,) * 4
    declare(library, best_first=(None, address, *sizes, *columns, ctypes.c_int32))
    return library
