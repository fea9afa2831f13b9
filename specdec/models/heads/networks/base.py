"""The interface between a rank's worker and a draft head.

A head sees token j of a sequence together with the target's *feature* of token j - 1: this is
*pair* j, whose KV is stored at slot j. So the KV of a slot depends on the tokens up to it, as the
target's does, and a cached block is wholly usable. Pair 0 does not exist: attention of a head
begins at slot 1. Only a head that reads no features, a whole model, has it (`first_slot`).

Features are a function of the target's hidden states, the final normed ones or those that enter
some layers (*taps*). The worker stores the former or the latter for each slot, so that any pair can
be computed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.kernels.reference.device_batch import AnyDeviceBatch, DeviceBatch
from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch, PairInputs
from specdec.kernels.reference.sample_rows import SampleParams
from specdec.models.lora.updates import AdapterStore
from specdec.types.drafts.draft_tree import Parents, TokenTree, TreeSize

HeadState = Any
"""State of a draft between its tokens; only the head that made it reads it."""


class DeviceDrafts(Enum):
    """How a head drafts on a device, in fixed shapes, and the protocol that has the calls.

    PAIRS: token by token, a DeviceHead. BLOCKS: all tokens in one pass, a DeviceBlockHead. STATES:
    without KV, a DeviceStateHead.
    """

    PAIRS = "pairs"
    BLOCKS = "blocks"
    STATES = "states"


@dataclass(frozen=True)
class HeadCapabilities:
    """Capabilities of a head beside the calls of DraftHead; its type has those of their protocols.

    runs_nodes: a TreeDraftHead. on_device: None for a head that drafts on the host alone, as those
    of native kernels. drafts_whole: a WholeDraftHead, and drafts_whole_trees: a WholeTreeHead;
    equal on all ranks. fits_graphs: whether its passes on a device can be graphs.
    """

    runs_nodes: bool = False
    on_device: DeviceDrafts | None = None
    drafts_whole: bool = False
    drafts_whole_trees: bool = False
    fits_graphs: bool = True


class DraftHead(Protocol):
    """One rank of a head. The calls that compute are collective, with the same rows on all ranks.

    taps: layers of the target whose input the head reads, ascending (0: the embedding, num_layers:
        the output of the last layer); empty for the final normed hidden states.
    feature_size: width of the feature of a token; 0 for a head that reads none.
    num_kv_layers: layers with KV; 0 for a head without attention.
    max_draft_tokens: most tokens of a draft that follow each other; None for no limit.
    reads_drafts: whether logits depend on the draft tokens before. Unless a head runs nodes too,
        `select` then may repeat a sequence, of which each copy continues with another token.
    vocab_size: number of draft tokens. vocab_slice: those whose logits this rank computes.
    target_ids: the target's id of each draft token, [vocab_size] int64; None if they are equal.
    """

    taps: tuple[int, ...]
    feature_size: int
    num_kv_layers: int
    max_draft_tokens: int | None
    reads_drafts: bool
    vocab_size: int
    vocab_slice: range
    target_ids: Tensor | None

    @property
    def device(self) -> torch.device: ...

    @property
    def capabilities(self) -> HeadCapabilities: ...

    def new_kv_cache(self, num_slots: int) -> Tensor | None:
        """Allocate a zeroed pool of `num_slots` pairs (whole blocks); None without KV layers."""
        ...

    def enable_adapters(self, dtype: torch.dtype) -> AdapterStore:
        """Return where adapters of the head are loaded; call it once, before the first pass.

        Each pair then runs with the adapter of its chunk, as do the drafts after it; no pass of
        fixed shape does. dtype: of the activations.
        """
        ...

    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """Return the features [T, feature_size] of a forward pass of the target.

        states: [T, len(taps), hidden_size]; without taps the final normed hidden states,
        [T, hidden_size]. runs: the adapters of the T tokens.
        """
        ...

    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> HeadState:
        """Run pairs, and return the state after the last pair of each of B sequences.

        pairs: chunks of tokens with the slots of their pairs; without KV layers, one token each.
        features: [T, feature_size], of the token before each. kv_cache: receives the KV of the
        pairs; the slots after them may be overwritten by a draft of `num_draft_tokens`, for which
        the block tables have room. With `num_draft_tokens` 0 only the KV is needed.
        """
        ...

    def logits(self, state: HeadState, index: int) -> Tensor:
        """Return this rank's logits [B, len(vocab_slice)] of draft token `index`, from 0 on."""
        ...

    def advance(self, state: HeadState, token_ids: Sequence[int], index: int) -> HeadState:
        """Return the state after draft token `index` of each sequence.

        token_ids: these draft tokens, as the target's ids.
        """
        ...

    def select(self, state: HeadState, rows: Sequence[int]) -> HeadState:
        """Return the state of some of its sequences, by index: the drafts of the others ended."""
        ...


FIRST_SLOT = 1
"""Pair 0 does not exist where heads read features: there is no token before the first."""


def first_slot(head: DraftHead) -> int:
    """Return the slot of the first pair of a head with KV."""
    return FIRST_SLOT if head.feature_size else 0


class FrontierNodes(NamedTuple):
    """Nodes of the draft tree of one sequence, to be run by a head that has KV.

    rows: of the state, that of each node's parent, or of the sequence for a child of the base.
    token_ids: as the target's ids. parents: of all nodes of the tree that have KV after this pass
    (`specdec.types.drafts.draft_tree`), these nodes last.
    """

    rows: Sequence[int]
    token_ids: Sequence[int]
    parents: Parents


class TreeDraftHead(DraftHead, Protocol):
    """A head with KV that can run the nodes of draft trees."""

    def advance_nodes(self, state: HeadState, trees: Sequence[FrontierNodes]) -> HeadState:
        """Return the state after nodes of trees: one row for each, in order.

        Node i of a tree has the i-th KV slot after the pairs of its sequence, where the block
        tables have room. A node sees the pairs and its own path.
        """
        ...


class DeviceKvHead(DraftHead, Protocol):
    """A head with KV whose passes run in fixed shapes, without a value that the host reads.

    output_size: width of the output of a pair.
    """

    @property
    def output_size(self) -> int: ...

    def run_on_device(self, batch: AnyDeviceBatch, features: Tensor, kv_cache: Tensor) -> Tensor:
        """Run pairs, write their KV, and return the output of each, [B * Q, output_size].

        features: [B * Q, feature_size], of the token before each. A collective call.
        """
        ...


class DeviceHead(DeviceKvHead, Protocol):
    """A head whose draft is a chain of passes: that over a token yields the next one."""

    def next_features(self, output: Tensor) -> Tensor:
        """Return the features of the pairs after pairs with this output, [B, feature_size]."""
        ...

    def output_logits(self, output: Tensor) -> Tensor:
        """Return this rank's logits [B, len(vocab_slice)] of the token after each pair."""
        ...


class DeviceBlockHead(DeviceKvHead, Protocol):
    """A head whose drafts come from one pass over a block of tokens after the pairs.

    `logits` of its states reads no value either.
    """

    def block_len(self, num_draft_tokens: int) -> int:
        """Return the length Q of the block for drafts of one token or more."""
        ...

    def block_tokens(self, token_ids: Tensor, num_draft_tokens: int) -> Tensor:
        """Return the block after the last tokens token_ids [B] of sequences, [B, Q] int64."""
        ...

    def run_block(self, batch: DeviceBatch, outputs: Tensor, kv_cache: Tensor) -> Tensor:
        """Run blocks; return the output of each draft token, [B, K, hidden_size].

        The positions of the batch are slots, that of the first token of a block after the last
        pair. Its context ends with the block, whose KV is not kept. outputs: of the last pairs, [B,
        hidden_size]. K: at least the number of draft tokens. A collective call.
        """
        ...

    def begin_on_device(self, outputs: Tensor, token_ids: Tensor) -> HeadState:
        """Return the state before drafts, by `run_block` and the last tokens [B] int64."""
        ...

    def advance_on_device(self, state: HeadState, token_ids: Tensor, index: int) -> HeadState:
        """Return what `advance` does; token_ids: [B] int64."""
        ...


class DeviceStateHead(DraftHead, Protocol):
    """A head without KV that drafts in fixed shapes, without a value that the host has to read.

    `logits` of its states neither reads one.
    """

    def begin_on_device(self, features: Tensor, token_ids: Tensor) -> HeadState:
        """Return what `begin` does.

        features: [B, feature_size], of the token before each of token_ids [B] int64.
        """
        ...

    def advance_on_device(self, state: HeadState, token_ids: Tensor, index: int) -> HeadState:
        """Return what `advance` does; token_ids: [B] int64."""
        ...


class WholeDraftHead(DraftHead, Protocol):
    """A head that can draft all tokens in one call."""

    def draft(
        self, inputs: PairInputs, counts: Sequence[int], params: SampleParams
    ) -> list[list[int]]:
        """Run pairs as `begin` does, and draft up to `counts` tokens after each of B sequences.

        The tokens are the argmax of logits, without temperature; else of logits / temperature, cut
        by top_k, top_p and min_p, and the noise that the target uses for its token. With several
        ranks, params may not cut. A collective call.

        counts: [B]; the block tables have room for all but the last token. params: of the first
        token of each sequence, [B]. Returns the target's ids; a draft ends early where the head's
        logits are not numbers.
        """
        ...


class WholeTreeHead(WholeDraftHead, Protocol):
    """A head that can draft whole trees in one call."""

    def draft_trees(
        self, inputs: PairInputs, sizes: Sequence[TreeSize], params: SampleParams
    ) -> list[TokenTree]:
        """Run pairs as `begin` does, and draft a tree of a size after each of B sequences.

        The trees are those of `specdec.worker.head.path_tree`; where two nodes are as good,
        rounding may decide. Arguments as for `draft`, whose params may cut.
        """
        ...
