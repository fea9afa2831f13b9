"""Drafting by recurrence: each pass of a head makes the feature for the next draft token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.reference.device_batch import AnyDeviceBatch
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, on_device
from specdec.models.heads.formats.eagle3 import Eagle3Shape
from specdec.models.heads.formats.fused import FusedShape
from specdec.models.heads.networks.base import DeviceDrafts, FrontierNodes, HeadCapabilities
from specdec.models.heads.networks.layers import KvHead, LayerPass
from specdec.models.heads.networks.target import TargetRank
from specdec.models.layers.norm import RMSNorm
from specdec.models.weights.checkpoint import CheckpointReader


class Place(NamedTuple):
    """Where the next pair of a sequence is stored; of a tree, its first node.

    adapter_id: with which it runs.
    """

    slot: int
    block_table: Sequence[int]
    adapter_id: int

    @classmethod
    def after(cls, chunk: Chunk) -> Place:
        """Return the place after the pairs of a sequence."""
        return cls(chunk.end, chunk.block_table, chunk.adapter_id)

    def chunk(self, token_ids: Sequence[int]) -> Chunk:
        """Return the pairs of tokens from here on."""
        return Chunk(token_ids, self.slot, self.block_table, adapter_id=self.adapter_id)


def tree_chunks(trees: Sequence[FrontierNodes], places: Sequence[Place]) -> list[Chunk]:
    """Return the chunks of nodes of trees. places: of each row of the state."""
    chunks = []
    for tree in trees:
        place = places[tree.rows[0]]
        num_before = len(tree.parents) - len(tree.token_ids)
        chunk = place._replace(slot=place.slot + num_before).chunk(tree.token_ids)
        chunks.append(chunk._replace(parents=tree.parents))
    return chunks


@dataclass(frozen=True)
class RecurrentState:
    """The output of the last pass for B sequences.

    output: [B, hidden_size], before the final norm.
    """

    output: Tensor
    places: tuple[Place, ...]
    block_size: int
    kv_cache: Tensor


class PassHead(ABC):
    """A head with KV that runs once for each draft token: its part of DraftHead."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """See DraftHead."""

    @abstractmethod
    def run_pairs(self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor) -> Tensor:
        """Write the KV of T pairs; return their outputs, [T, hidden_size]. features: [T, F]."""

    @abstractmethod
    def output_logits(self, output: Tensor) -> Tensor:
        """See DeviceHead."""

    @abstractmethod
    def next_features(self, output: Tensor) -> Tensor:
        """See DeviceHead."""

    @torch.inference_mode()
    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> RecurrentState:
        """See DraftHead."""
        assert kv_cache is not None
        output = self.run_pairs(pairs, features, kv_cache)
        last = on_device(pairs.cu_seqlens_q[1:] - 1, self.device)
        places = tuple(map(Place.after, pairs.chunks))
        return RecurrentState(output[last], places, pairs.block_size, kv_cache)

    @torch.inference_mode()
    def logits(self, state: RecurrentState, index: int) -> Tensor:
        """See DraftHead."""
        return self.output_logits(state.output)

    @torch.inference_mode()
    def advance(
        self, state: RecurrentState, token_ids: Sequence[int], index: int
    ) -> RecurrentState:
        """See DraftHead."""
        chunks = [
            place.chunk([token]) for token, place in zip(token_ids, state.places, strict=True)
        ]
        features = self.next_features(state.output)
        output = self.run_pairs(ForwardBatch(chunks, state.block_size), features, state.kv_cache)
        places = tuple(place._replace(slot=place.slot + 1) for place in state.places)
        return replace(state, output=output, places=places)

    @torch.inference_mode()
    def advance_nodes(
        self, state: RecurrentState, trees: Sequence[FrontierNodes]
    ) -> RecurrentState:
        """See TreeDraftHead."""
        rows = [row for tree in trees for row in tree.rows]
        features = self.next_features(state.output)[rows]
        places = tuple(state.places[row] for row in rows)
        pairs = ForwardBatch(tree_chunks(trees, state.places), state.block_size)
        output = self.run_pairs(pairs, features, state.kv_cache)
        return replace(state, output=output, places=places)

    def select(self, state: RecurrentState, rows: Sequence[int]) -> RecurrentState:
        """See DraftHead."""
        places = tuple(state.places[row] for row in rows)
        return replace(state, output=state.output[list(rows)], places=places)


class RecurrentHead(KvHead, PassHead):
    """One rank of a head whose passes make the feature for the next token, a DraftHead.

    Subclasses implement `run`. norm: before the output head; None without one. recycles_norm:
    whether the feature of a drafted token is after that norm.
    """

    reads_drafts: bool = True
    capabilities = HeadCapabilities(runs_nodes=True, on_device=DeviceDrafts.PAIRS)

    def __init__(
        self, shape: FusedShape | Eagle3Shape, reader: CheckpointReader, target: TargetRank
    ) -> None:
        super().__init__(shape, reader, target)
        self.norm: RMSNorm | None = None
        if shape.has_final_norm:
            sizes = shape.decoder.hidden_size, shape.decoder.rms_norm_eps
            self.norm = RMSNorm(reader, "norm.weight", *sizes)
        self.recycles_norm = shape.recycles_norm

    @abstractmethod
    def run(
        self,
        embedded: Tensor,  # [T, hidden_size]: of the token of each pair
        features: Tensor,  # [T, feature_size]
        layer_pass: LayerPass,
        kv_cache: Tensor,
    ) -> Tensor:
        """Write the KV of pairs; return the output of the last layer, [T, hidden_size]."""

    def output_logits(self, output: Tensor) -> Tensor:
        """See DeviceHead."""
        logits: Tensor = self.lm_head(output if self.norm is None else self.norm(output))
        return logits

    def next_features(self, output: Tensor) -> Tensor:
        """See DeviceHead."""
        is_normed = self.recycles_norm and self.norm is not None
        features: Tensor = self.norm(output) if is_normed and self.norm else output
        return features

    def run_on_device(self, batch: AnyDeviceBatch, features: Tensor, kv_cache: Tensor) -> Tensor:
        """See DeviceHead."""
        embedded = self.embed_tokens(batch.input_ids)
        layer_pass = self.attention.begin_device_pass(batch)
        return self.run(embedded, features.to(self.attention.dtype), layer_pass, kv_cache)

    def run_pairs(self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor) -> Tensor:
        """See PassHead."""
        features = features.to(self.attention.dtype)
        embedded = self.embed_tokens(on_device(pairs.input_ids, self.device))
        layer_pass = self.attention.begin_pass(pairs)
        with self.running(pairs.adapter_runs):
            return self.run(embedded, features, layer_pass, kv_cache)
