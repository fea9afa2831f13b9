"""The operations on rows of logits, and on slots and texts by row: torch, C++ or Triton.

Each is defined once, in torch (`sampling.device`, `kernels`), and a kernel yields the same.
A rank selects the object for all of them when it is loaded.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specdec.config.engine import Kernels
from specdec.kernels.backend import KernelBackend
from specdec.kernels.best_first import BestFirstTrees, best_first, torch_best_first
from specdec.kernels.moves import AcceptedPaths, PathMoves, move_slots, path_moves
from specdec.kernels.reference.kv_scales import as_bytes
from specdec.kernels.reference.logit_edits import LogitEdits
from specdec.kernels.reference.ngram import NgramLengths, Texts, lookup
from specdec.kernels.reference.sample_rows import RowArgmax
from specdec.kernels.sample import best_drafts, row_argmax, sample_tokens, torch_row_argmax
from specdec.sampling.device.device_children import (
    NUM_WEIGHED,
    DeviceChildren,
    best_children,
    confidences_of_scores,
)
from specdec.sampling.device.device_edits import apply_edits, edit_rows
from specdec.sampling.device.device_sampler import (
    DeviceRules,
    DeviceSample,
    SamplingKind,
    sample_of,
    sample_rows,
)
from specdec.sampling.device.device_trees import DeviceTrees, VerifiedTrees, verify_trees
from specdec.sampling.gumbel import LEAST_SCORE
from specdec.sampling.sampling_batch import SamplingBatch


class RowOps:
    """The definitions, in torch.

    `sample_batch` and `children_of` take what the host knows about the rows, and may wait for the
    device; nothing else reads a value.
    """

    name: ClassVar[str] = "torch"

    def argmax(self, logits: Tensor) -> RowArgmax:
        """Return the argmax of each row; logits: [num_rows, n], of any float type."""
        return torch_row_argmax(logits)

    def sample(
        self,
        logits: Tensor,
        rules: DeviceRules | None,
        kind: SamplingKind,
        *,
        on_host: bool = False,
    ) -> DeviceSample:
        """See `sample_rows`."""
        return sample_rows(logits, rules, kind, on_host=on_host)

    def sample_batch(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Sample each row, [num_rows] int64; a row without a finite logit yields some token.

        logits: as in `sample`. batch: of these rows.
        """
        return self.sample(logits, batch.rules, batch.kind, on_host=True).token_ids

    def children(
        self,
        logits: Tensor,
        rules: DeviceRules | None,
        kind: SamplingKind,
        count: int,
        *,
        on_host: bool = False,
    ) -> DeviceChildren:
        """See `best_children`."""
        return best_children(logits, rules, kind, count, on_host=on_host)

    def children_of(
        self, logits: Tensor, batch: SamplingBatch | None, count: int
    ) -> DeviceChildren:
        """Return the children of rows of the whole vocabulary; batch: None for greedy rows."""
        if batch is None or not batch.is_any_sampled:
            return self.children(logits, None, SamplingKind.GREEDY, count, on_host=True)
        return self.children(logits, batch.rules, batch.kind, count, on_host=True)

    def best_first(self, log_survival: Tensor, num_nodes: Tensor, max_nodes: int) -> BestFirstTrees:
        """See `torch_best_first`."""
        return torch_best_first(log_survival, num_nodes, max_nodes)

    def verify_trees(self, sample: DeviceSample, trees: DeviceTrees) -> VerifiedTrees:
        """See `device_trees.verify_trees`."""
        return verify_trees(sample, trees)

    def edit(
        self,
        logits: Tensor,
        edits: LogitEdits,
        paths: Tensor,
        positions: Tensor,
        first_token: int,
    ) -> None:
        """See `apply_edits`."""
        apply_edits(logits, edits, paths, positions, first_token, self._edit_rows)

    def lookup(
        self, texts: Texts, num_wanted: Tensor, ngrams: NgramLengths, num_tokens: int
    ) -> Tensor:
        """See `kernels.reference.ngram.lookup`."""
        return lookup(texts, num_wanted, ngrams, num_tokens)

    def path_moves(self, paths: AcceptedPaths) -> PathMoves:
        """See `kernels.moves.path_moves`."""
        return path_moves(paths)

    def move(self, slots: Tensor, moves: PathMoves) -> None:
        """See `kernels.moves.move_slots`."""
        move_slots(slots, moves)

    def _edit_rows(
        self, logits: Tensor, edits: LogitEdits, paths: Tensor, first_token: int
    ) -> None:
        edit_rows(logits, edits, paths, first_token)


class CpuRowOps(RowOps):
    """Kernels in C++ for what the host samples; rows that these leave open go to torch."""

    name = "cpu"

    def argmax(self, logits: Tensor) -> RowArgmax:
        """See RowOps."""
        return row_argmax(logits)

    def sample_batch(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """See RowOps."""
        sampled = sample_tokens(logits, batch.params)
        if len(rest := np.flatnonzero(sampled < 0)):
            own = logits[torch.from_numpy(rest)], batch.take(rest)
            sampled[rest] = super().sample_batch(*own).numpy()
        return torch.from_numpy(sampled)

    def children_of(
        self, logits: Tensor, batch: SamplingBatch | None, count: int
    ) -> DeviceChildren:
        """See RowOps; rounding may decide."""
        if batch is None or not (batch.params["temperature"] > 0).all():
            return super().children_of(logits, batch, count)
        target_ids = torch.arange(logits.shape[1], dtype=torch.int32)
        return self.draft_children(logits, target_ids, batch, count)

    def best_first(self, log_survival: Tensor, num_nodes: Tensor, max_nodes: int) -> BestFirstTrees:
        """See RowOps."""
        return best_first(log_survival, num_nodes, max_nodes)

    def draft_children(
        self, logits: Tensor, target_ids: Tensor, batch: SamplingBatch, count: int
    ) -> DeviceChildren:
        """Return the best children of rows of a draft vocabulary, with temperatures above 0.

        logits: [num_rows, n]. target_ids: of its tokens, [n] int32, ascending. Rounding may decide.
        """
        scores, token_ids = best_drafts(logits, target_ids, batch.params, max(count, NUM_WEIGHED))
        temperatures = batch.rules.temperatures.double()
        confidences = confidences_of_scores(scores.double(), temperatures)
        return DeviceChildren(token_ids[:, :count], confidences[:, :count])


class TritonRowOps(RowOps):
    """Kernels in Triton."""

    name = "triton"

    def argmax(self, logits: Tensor) -> RowArgmax:
        """See RowOps."""
        from specdec.kernels.triton.sample import TileArgmax  # imports Triton

        return TileArgmax(logits).reduce()

    def sample(
        self,
        logits: Tensor,
        rules: DeviceRules | None,
        kind: SamplingKind,
        *,
        on_host: bool = False,
    ) -> DeviceSample:
        """See RowOps; never waits for the device."""
        del on_host
        from specdec.kernels.triton import sample  # imports Triton

        if rules is None:
            return sample_of(self.argmax(logits))
        truncates = kind is SamplingKind.TRUNCATED
        sampling = sample.RowSampling(*rules.columns)
        found = sample.sample_rows(logits, sampling, LEAST_SCORE, truncates=truncates)
        return DeviceSample(found.token_ids, sample_of(found.argmax).is_invalid)

    def children(
        self,
        logits: Tensor,
        rules: DeviceRules | None,
        kind: SamplingKind,
        count: int,
        *,
        on_host: bool = False,
    ) -> DeviceChildren:
        """See RowOps; never waits for the device."""
        del on_host
        from specdec.kernels.triton import children, sample  # imports Triton

        sampling = None if rules is None else sample.RowSampling(*rules.columns)
        truncates = kind is SamplingKind.TRUNCATED
        found = children.best_children(logits, sampling, count, NUM_WEIGHED, truncates=truncates)
        return DeviceChildren(*found)

    def best_first(self, log_survival: Tensor, num_nodes: Tensor, max_nodes: int) -> BestFirstTrees:
        """See RowOps."""
        from specdec.kernels.triton import best_first  # imports Triton

        return BestFirstTrees(*best_first.best_first(log_survival, num_nodes, max_nodes))

    def verify_trees(self, sample: DeviceSample, trees: DeviceTrees) -> VerifiedTrees:
        """See RowOps."""
        from specdec.kernels.triton.verify import walk_trees  # imports Triton

        tokens, parents = trees.token_ids, trees.parents
        if parents is None:
            num_nodes = tokens.shape[1]
            parents = torch.arange(-1, num_nodes - 1, device=tokens.device).expand_as(tokens)
        drafts = (tokens, parents, trees.num_nodes, trees.num_kept)
        return VerifiedTrees(*walk_trees(sample.token_ids, sample.is_invalid, *drafts))

    def lookup(
        self, texts: Texts, num_wanted: Tensor, ngrams: NgramLengths, num_tokens: int
    ) -> Tensor:
        """See RowOps."""
        from specdec.kernels.triton import ngram  # imports Triton

        return ngram.lookup(texts, num_wanted, ngrams, num_tokens)

    def path_moves(self, paths: AcceptedPaths) -> PathMoves:
        """See RowOps."""
        from specdec.kernels.triton import moves  # imports Triton

        return PathMoves(*moves.path_moves(*paths))

    def move(self, slots: Tensor, moves: PathMoves) -> None:
        """See RowOps."""
        from specdec.kernels.triton.moves import move_slots as move_by_kernel  # imports Triton

        move_by_kernel(as_bytes(slots), *moves)

    def _edit_rows(
        self, logits: Tensor, edits: LogitEdits, paths: Tensor, first_token: int
    ) -> None:
        from specdec.kernels.triton.edits import edit_rows as edit_by_kernel  # imports Triton

        edit_by_kernel(logits, edits, paths, first_token)


_BY_BACKEND: dict[KernelBackend, RowOps] = {
    KernelBackend.TORCH: RowOps(),
    KernelBackend.CPU: CpuRowOps(),
    KernelBackend.TRITON: TritonRowOps(),
}


def row_ops_of(kernels: Kernels, device: torch.device) -> RowOps:
    """Return the operations of a device; compiles the C++ kernels on first use.

    Raises InvalidValueError as KernelBackend.select.
    """
    return _BY_BACKEND[KernelBackend.select(kernels, device)]
