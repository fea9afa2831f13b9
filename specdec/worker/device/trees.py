"""Draft trees in steps on the device: the nodes of a pass, verification, and what follows a path.

All of it reads and writes static buffers, so that it is a part of the graphs of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.moves import AcceptedPaths
from specdec.kernels.reference.device_batch import TreeNodes
from specdec.sampling.device.device_sampler import DeviceSample
from specdec.sampling.device.device_trees import DeviceTrees, VerifiedChains
from specdec.sampling.row_ops import RowOps
from specdec.worker.device.input.input import Packed, Word
from specdec.worker.device.state import DeviceState, DeviceStepLimits


def nodes_of(packed: Packed, positions: Tensor) -> TreeNodes | None:
    """Return the trees of a step whose rows have equally many tokens; None where it has none.

    positions: [num_rows, Q], of the tokens.
    """
    if packed.trees is None:
        return None
    return TreeNodes(packed.trees.words.flatten(), first_nodes_of(packed), positions[:, 1:])


def first_nodes_of(packed: Packed) -> Tensor:
    """Return `TreeNodes.first_nodes` of a step with trees, [num_rows]."""
    assert packed.trees is not None, "a step with trees"
    num_behind = torch.where(packed.trees.is_tree, 0, packed.num_drafts)
    return packed.starts + 1 + num_behind


class TreePaths:
    """Verifies the trees of a step, and moves KV and features after the accepted paths."""

    def __init__(
        self,
        state: DeviceState,
        limits: DeviceStepLimits,
        kv_cache: Tensor,
        ops: RowOps,
        features: Tensor | None = None,
    ) -> None:
        """kv_cache: of the target, with a padding block after the pool.

        features: [num_slots, feature_size] of a head that drafts on the device, by the same slots.
        """
        size = (limits.max_num_seqs, limits.max_query_len)
        self._places = torch.zeros(size, dtype=torch.int64, device=kv_cache.device)
        self._state, self._block_size, self._ops = state, limits.block_size, ops
        self._by_slot = [kv_cache] if features is None else [kv_cache, features[None]]

    def verify(self, packed: Packed, sample: DeviceSample) -> VerifiedChains:
        """Verify the drafts of a step with trees, and move what is stored of the accepted nodes."""
        assert packed.trees is not None, "a step with trees"
        num_kept = packed.table[:, Word.NUM_KEPT]
        drafts = DeviceTrees(packed.drafts, packed.trees.parents, packed.num_drafts, num_kept)
        verified = self._ops.verify_trees(sample, drafts)
        assert verified.places is not None, "trees have places"
        self._places[: len(verified.places), : verified.places.shape[1]] = verified.places
        moves = self._ops.path_moves(
            AcceptedPaths(
                places=verified.places,
                num_tokens=verified.counts,
                bases=packed.starts,
                block_tables=self._state.tables,
                tables=packed.places,
                block_size=self._block_size,
            )
        )
        for slots in self._by_slot:
            self._ops.move(slots, moves)
        return verified.chains

    def places(self, num_rows: int, query_len: int) -> Tensor:
        """Return which sampled token each new one of the last step was, [num_rows, Q].

        The first of a row is after the base, and the one after node i has the place i + 1.
        """
        return self._places[:num_rows, :query_len]
