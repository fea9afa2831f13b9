"""Drafts of a head on the device, after the tokens that a step has verified there.

Tokens, positions and the number of tokens stay on the device: the next step takes them there, and
the host receives them with the result of this one. `pairs` has heads with KV that draft token by
token, `tree_growth` their trees, `block` has heads of a block, and `state_head` those without KV;
the trees of the last two grow best first. The drafts are those of `worker.head.runner`, which
serves all other steps on the same features and KV.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.reference.logit_edits import LogitEdits
from specdec.sampling.device.device_children import DeviceChildren
from specdec.sampling.device.device_growth import (
    DepthChildren,
    GrownChains,
    GrownTrees,
    GrowthShape,
)
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.sampling.device.device_trees import VerifiedChains
from specdec.worker.device.input.buffers import StepBuffers
from specdec.worker.device.rules import PARAM_WORDS, rules_of
from specdec.worker.device.state import DeviceState, DeviceStepLimits
from specdec.worker.device.step_graphs import StepGraphs, StepShape
from specdec.worker.head.parts import BlockParts, HeadParts, PairParts, StateParts
from specdec.worker.head.sampler import Shaping

Parts = TypeVar("Parts", bound=HeadParts)
LaunchedParts = TypeVar("LaunchedParts", bound=BlockParts | StateParts)


class DraftRows(NamedTuple):
    """The rows after which a head drafts, as the host has packed them.

    params: records of SAMPLE_PARAMS. num_prompt: tokens of the prompt. num_wanted: draft tokens.
    depth: of a tree of these; 0 for a chain.
    """

    params: Tensor  # [num_rows, PARAM_WORDS] int64
    places: Tensor  # [num_rows] int64, like the next three
    num_prompt: Tensor
    num_wanted: Tensor
    depth: Tensor


def growth_shape(parts: HeadParts, limits: DeviceStepLimits) -> GrowthShape | None:
    """Return the largest trees that a head drafts on the device; None where it drafts none.

    They grow level by level where a node's logits depend on its path, and else best first.
    """
    head = parts.head
    grows_by_level = isinstance(parts, PairParts) and head.capabilities.runs_nodes
    is_given = isinstance(parts, StateParts) and parts.has_tree_choices
    if not limits.max_tree_nodes or head.reads_drafts != grows_by_level or is_given:
        return None
    depth = min(limits.max_tree_depth, head.max_draft_tokens or limits.max_tree_depth)
    return GrowthShape.of(limits.max_tree_nodes, depth)


class StepParts(NamedTuple):
    """Data that drafts share with the steps before them. buffers: receive the drafts."""

    buffers: StepBuffers
    state: DeviceState
    limits: DeviceStepLimits
    graphs: StepGraphs


class HeadDrafts(Generic[Parts]):
    """Static buffers of drafts, and the selection of their tokens.

    parts: of the head, which another one of the same sizes may replace. growth: of the largest
    trees; None where the host drafts trees, if there are any.
    """

    def __init__(self, parts: Parts, step: StepParts) -> None:
        self.parts: Parts = parts
        self.growth = growth_shape(parts, step.limits)
        _, self._state, self._limits, _ = step
        self._layout, state, limits = step.buffers.layout, step.state, step.limits
        drafts = self._all_drafts = step.buffers.drafts(limits.max_num_seqs)
        self._drafts = drafts[:, : 1 + limits.max_draft_tokens]  # chains
        self._confidences = self._layout.confidences(drafts)
        num_rows = limits.max_num_seqs
        ids = partial(torch.zeros, dtype=torch.int64, device=drafts.device)
        self._rows = DraftRows(
            ids(num_rows, PARAM_WORDS),
            ids(num_rows) + state.padding_place,
            *(ids(num_rows) for _ in range(3)),
        )
        self._ends = ids(num_rows) + 1  # lengths before the drafts
        self._tokens = ids(num_rows)  # drafted last
        self._index = ids(1)  # number of tokens that each row has, or had ended at
        self._offsets = torch.arange(1 + limits.max_query_len, device=drafts.device)

    def _start(self, rows: DraftRows, verified: VerifiedChains, shape: StepShape) -> Tensor:
        """Take the rows, with empty drafts; return those that want one, [num_rows] bool.

        The state has the lengths with the new tokens.
        """
        own = self._own_rows(shape.num_rows)
        ends = self._state.num_tokens[rows.places]
        most = self._limits.max_model_len - 1 - ends  # a token of the target fits after them
        wants = (rows.num_wanted > 0) & (verified.counts > 0)
        num_wanted = torch.minimum(rows.num_wanted, most).clamp_min(0) * wants
        given_rows = rows._replace(num_wanted=num_wanted)
        for mine, given in zip(own, given_rows, strict=True):
            mine.copy_(given)
        self._ends[: shape.num_rows] = ends
        self._drafts[: shape.num_rows, 0] = 0
        self._index.zero_()
        return wants

    def _select(
        self, logits: Tensor, kind: SamplingKind, num_rows: int, edits: LogitEdits | None
    ) -> None:
        """Select the next token of each row that goes on; the held drafts are those so far.

        A draft ends where the head's logits are not numbers. logits: [num_rows,
        len(vocab_slice)], of the head. edits: of the target's logits after the draft, one row for
        each sequence.
        """
        rows, drafts = self._own_rows(num_rows), self._drafts[:num_rows]
        before = self._ends[:num_rows] + self._index - 1
        column = self._index.clamp_max(drafts.shape[1] - 2)  # after it in captures
        if self.parts.sampler.has_confidences:
            confidences = self.parts.sampler.confidences(logits)
            self._confidences[:num_rows].index_copy_(1, column, confidences[:, None])
        shaping = None
        if edits is not None:
            is_drafted = self._offsets[: drafts.shape[1] - 1] < self._index
            paths = drafts[:, 1:].masked_fill(~is_drafted, -1)[edits.rows]
            shaping = Shaping(edits, paths, before + 1 - rows.num_prompt)
        rules = rules_of(kind, rows.params, before[:, None], rows.num_prompt)
        sample = self.parts.sampler.select_on_device(logits, rules, shaping)
        goes_on = self._goes_on(num_rows) & ~sample.is_invalid
        tokens = sample.token_ids.masked_fill(~goes_on, 0)
        drafts.index_copy_(1, column + 1, tokens[:, None])
        drafts[:, 0] += goes_on
        self._state.held_drafts.index_copy_(0, rows.places, drafts)
        self._tokens[:num_rows] = tokens
        self._index += 1

    def holds_tree(self, num_nodes: int, depth: int) -> bool:
        """Return whether it drafts trees of this size; depth: 0 for a chain beside trees."""
        return self.growth is not None and self.growth.holds_best_first(num_nodes, depth)

    def _children(
        self,
        logits: Tensor,
        level: int,
        count: int,
        kind: SamplingKind,
        edits: LogitEdits | None,
        paths: Tensor,
    ) -> DeviceChildren:
        """Return the `count` best children of the nodes of a level.

        logits: [num_rows * F, len(vocab_slice)]. paths: tokens before these children, [num_rows,
        F, level] int64; read only with edits.
        """
        num_rows = len(paths)
        rows = self._own_rows(num_rows)
        before = (self._ends[:num_rows, None] + level - 1).expand(-1, len(logits) // num_rows)
        shaping = None
        if edits is not None:
            spread = edits.spread(before.shape[1])
            positions = (before + 1 - rows.num_prompt[:, None]).flatten()
            shaping = Shaping(spread, paths.flatten(0, 1)[spread.rows], positions)
        rules = rules_of(kind, rows.params, before, rows.num_prompt)
        return self.parts.sampler.children_on_device(logits, rules, count, shaping)

    def _keep(self, trees: GrownTrees, chains: GrownChains, is_tree: Tensor) -> None:
        """Write the trees to the output, and with their first paths where the next step reads them.

        There a chain that was wanted is no tree: the next step may take less of it than a tree may
        be deep. is_tree: [num_rows] bool.
        """
        num_rows, num_nodes = trees.token_ids.shape
        of_tokens = self._layout.tokens(self._all_drafts)
        of_tokens[:num_rows, 0] = trees.counts
        of_tokens[:num_rows, 1 : 1 + num_nodes] = trees.token_ids
        self._layout.parents(self._all_drafts)[:num_rows, :num_nodes] = trees.parents
        places, held = self._own_rows(num_rows).places, self._state.held_drafts
        tokens = pad(chains.token_ids, (0, held.shape[1] - 1 - chains.token_ids.shape[1]))
        held.index_copy_(0, places, torch.cat([chains.counts[:, None], tokens], 1))
        counts = trees.counts.masked_fill(~is_tree, 0)
        nodes = torch.cat([counts[:, None], trees.token_ids, trees.parents], 1)
        self._state.held_trees.index_copy_(0, places, nodes)

    def _own_rows(self, num_rows: int) -> DraftRows:
        return DraftRows(*(each[:num_rows] for each in self._rows))

    def _goes_on(self, num_rows: int) -> Tensor:
        """Return the rows that have a token at each place so far, and want another."""
        num_drafts = self._drafts[:num_rows, 0]
        return (num_drafts == self._index) & (num_drafts < self._rows.num_wanted[:num_rows])


class LaunchedDrafts(HeadDrafts[LaunchedParts], ABC):
    """Drafts whose tokens are all selected in one launch, from a block or states without KV."""

    @abstractmethod
    def _inputs(self, num_rows: int, count: int) -> Tensor:
        """Return what the head begins drafts of `count` tokens with, [num_rows, ...]."""

    def draft(self, kind: SamplingKind, shape: StepShape, edits: LogitEdits | None = None) -> None:
        """Draft `shape.query_len` - 1 tokens of each row, or as many as the head has.

        Of each row those that it wants are kept. edits: as in `_select`.
        """
        head, num_rows = self.parts.head, shape.num_rows
        count, tokens = self._num_of(shape), self._tokens[:num_rows]
        state = head.begin_on_device(self._inputs(num_rows, count), tokens)
        for index in range(count):
            if index > 0:
                state = head.advance_on_device(state, tokens, index - 1)
            self._select(head.logits(state, index), kind, num_rows, edits)

    def grow(self, kind: SamplingKind, shape: StepShape, edits: LogitEdits | None = None) -> None:
        """Draft the tree or the chain that each row wants, best first; edits: as in `_select`.

        The head is one whose logits do not depend on the draft tokens before.
        """
        assert self.growth is not None, "the host drafts trees"
        head, num_rows = self.parts.head, shape.num_rows
        inputs = self._inputs(num_rows, self.growth.depth)
        state = head.begin_on_device(inputs, self._tokens[:num_rows])
        levels = list[DeviceChildren]()
        chain = self._tokens.new_zeros(num_rows, 0)
        for index in range(self.growth.depth):
            logits, count = head.logits(state, index), self.growth.num_ranks
            levels.append(self._children(logits, index, count, kind, edits, chain[:, None]))
            chain = torch.cat([chain, levels[-1].token_ids[:, :1]], 1)
        rows = self._own_rows(num_rows)
        is_tree = rows.depth > 0
        depths = torch.where(is_tree, rows.depth, rows.num_wanted)
        depths = depths.clamp_max(self.growth.depth).minimum(rows.num_wanted)
        counts = torch.where(is_tree, rows.num_wanted, depths)
        children = DepthChildren(*(torch.stack(each, 1) for each in zip(*levels, strict=True)))
        children = children.within(counts, depths)
        trees = self.parts.sampler.best_first(children, counts, self.growth.num_nodes)
        chain_lens = (children.confidences[:, :, 0] > 0).long().cumprod(1).sum(1)
        self._keep(trees, GrownChains(chain_lens, chain), counts > depths)

    def _num_of(self, shape: StepShape) -> int:
        """Return the tokens of a whole draft: `shape.query_len` - 1, or as many as there can be."""
        most = self.parts.head.max_draft_tokens
        return shape.query_len - 1 if most is None else min(most, shape.query_len - 1)
