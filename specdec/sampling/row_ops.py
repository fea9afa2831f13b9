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
    sample_of,
    sample_rows,
)
from specdec.sampling.device.device_trees import DeviceTrees, VerifiedTrees, verify_trees
from specdec.sampling.gumbel import LEAST_SCORE
from specdec.sampling.sampling_batch import SamplingBatch


class RowOps:
    """The definitions, in torch.

    What takes a SamplingBatch, or has `on_host`, may wait for the device; nothing else reads a
    value.
    """

    name: ClassVar[str] = "torch"

    def argmax(self, logits: Tensor) -> RowArgmax:
        """Return the argmax of each row; logits: [num_rows, n], of any float type."""
        return torch_row_argmax(logits)

    def sample(
        self, logits: Tensor, rules: DeviceRules | None, *, on_host: bool = False
    ) -> DeviceSample:
        """See `sample_rows`."""
        return sample_rows(logits, rules, on_host=on_host)

    def sample_batch(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Sample each row, [num_rows] int64; a row without a finite logit yields some token.

        logits: as in `sample`. batch: of these rows.
        """
        return self.sample(logits, batch.rules, on_host=True).token_ids

    def children(
        self,
        logits: Tensor,
        sampling: DeviceRules | SamplingBatch | None,
        count: int,
        *,
        on_host: bool = False,
    ) -> DeviceChildren:
        """See `best_children`; sampling: None for the tokens with the largest logits."""
        return best_children(logits, _rules_of(sampling), count, on_host=on_host)

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
            own = logits[torch.from_numpy(rest)], batch[rest]
            sampled[rest] = super().sample_batch(*own).numpy()
        return torch.from_numpy(sampled)

    def children(
        self,
        logits: Tensor,
        sampling: DeviceRules | SamplingBatch | None,
        count: int,
        *,
        on_host: bool = False,
    ) -> DeviceChildren:
        """See RowOps; of rows that the host knows rounding may decide."""
        if isinstance(sampling, SamplingBatch) and (sampling.params["temperature"] > 0).all():
            target_ids = torch.arange(logits.shape[1], dtype=torch.int32)
            return self.draft_children(logits, target_ids, sampling, count)
        return super().children(logits, sampling, count, on_host=on_host)

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
        self, logits: Tensor, rules: DeviceRules | None, *, on_host: bool = False
    ) -> DeviceSample:
        """See RowOps; never waits for the device."""
        del on_host
        from specdec.kernels.triton.sample import sample_rows as sample_by_kernel  # imports Triton

        if rules is None:
            return sample_of(self.argmax(logits))
        truncates = rules.truncates
        tokens, best = sample_by_kernel(logits, rules.columns, LEAST_SCORE, truncates=truncates)
        return DeviceSample(tokens, sample_of(best).is_invalid)

    def children(
        self,
        logits: Tensor,
        sampling: DeviceRules | SamplingBatch | None,
        count: int,
        *,
        on_host: bool = False,
    ) -> DeviceChildren:
        """See RowOps; never waits for the device."""
        del on_host
        from specdec.kernels.triton import children  # imports Triton

        rules = _rules_of(sampling)
        columns, truncates = (rules.columns, rules.truncates) if rules else (None, False)
        found = children.best_children(logits, columns, count, NUM_WEIGHED, truncates=truncates)
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


def _rules_of(sampling: DeviceRules | SamplingBatch | None) -> DeviceRules | None:
    """Return the rules of rows; None where all are greedy."""
    if isinstance(sampling, SamplingBatch):
        return sampling.rules if sampling.is_any_sampled else None
    return sampling


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
