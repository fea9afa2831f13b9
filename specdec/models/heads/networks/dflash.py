"""DFlash and DSpark: a block of masked tokens attends to itself and to features of the target.

Keys and values of the context are projections of the features alone, the same feature in all
layers; those of a token's feature are at the slot after the token, and rotated to its position.
The block's own are used once and not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels import Rotation
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.device_batch import AnyDeviceBatch, DeviceBatch
from specdec.kernels.reference.forward_batch import (
    AdapterRun,
    Chunk,
    ForwardBatch,
    adapter_runs,
    on_device,
)
from specdec.models.heads.formats.dflash import DFlashShape
from specdec.models.heads.networks.base import FIRST_SLOT, DeviceDrafts, HeadCapabilities
from specdec.models.heads.networks.layers import KvHead, decoder_layer
from specdec.models.heads.networks.markov import MarkovHead, MarkovState
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.heads.networks.target import TargetRank, concatenated
from specdec.models.layers.decoder_layer import Attention, DecoderLayer
from specdec.models.layers.linear import embedding_scale
from specdec.models.layers.norm import RMSNorm
from specdec.models.weights.checkpoint import CheckpointReader


@dataclass(frozen=True)
class BlockState:
    """B drafts after S sequences.

    outputs: [S, K, hidden_size], one for each draft token, normed. logits: [S, K,
    len(vocab_slice)], of this rank, without the Markov head's part. sequences: of the drafts, [B]
    int64; None for one draft of each.
    """

    outputs: Tensor
    logits: Tensor
    markov: MarkovState | None
    sequences: Tensor | None = None

    def of_drafts(self, rows: Tensor) -> Tensor:
        """Return the rows [S, ...] of the sequences for the drafts, [B, ...]."""
        return rows if self.sequences is None else rows[self.sequences]

    def select(self, rows: Sequence[int]) -> BlockState:
        """Return some of the drafts, by index."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.outputs.device)
        sequences = index if self.sequences is None else self.sequences[index]
        return replace(self, markov=self.markov and self.markov.select(rows), sequences=sequences)


class _Visibility(NamedTuple):
    """What a block sees in a layer. is_causal: within the block."""

    window: int | None
    is_causal: bool


@dataclass(frozen=True)
class _Context:
    """KV slots of one sequence's context, [S] int64, and what each slot of its block sees.

    masks: [block_size, S + block_size] additive, by visibility; None where everything is visible.
    """

    slots: Tensor
    masks: dict[_Visibility, Tensor | None]


class DFlashHead(KvHead):
    """One rank of a DFlash or DSpark head, a DeviceBlockHead."""

    capabilities = HeadCapabilities(on_device=DeviceDrafts.BLOCKS)

    def __init__(self, shape: DFlashShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__(shape, reader, target)
        decoder, group = shape.decoder, target.group
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.shape, self.block_size = shape, target.block_size
        self._embedding_scale = embedding_scale(decoder.traits, target.dtype)
        width = len(shape.layers_read.layer_ids) * hidden
        self.fc = SharedInputLinear(reader, "fc", (hidden, width), group)
        self.feature_norm = RMSNorm(reader, "hidden_norm.weight", hidden, eps)
        self.layers = nn.ModuleList(
            decoder_layer(decoder, reader, index, target) for index in range(decoder.num_layers)
        )
        self.norm = RMSNorm(reader, "norm.weight", hidden, eps)
        self.markov = MarkovHead(shape, reader, target) if shape.markov_rank else None
        self.visibilities = [
            _Visibility(window, index in shape.causal_layers)
            for index, window in enumerate(decoder.sliding_windows)
        ]
        self.reads_drafts = self.markov is not None
        heads = self.attention.heads
        kv_of_queries = [index // heads.heads_per_kv - heads.kv.start for index in heads.query]
        self.kv_of_queries = torch.tensor(kv_of_queries, device=target.device)

    @property
    def adapted_parts(self) -> nn.Module:
        """See AdaptedNetwork: all but the Markov head, whose kernels take none."""
        return nn.ModuleList([self.fc, self.layers])

    @torch.inference_mode()
    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """See DraftHead."""
        inputs = concatenated(states, self.shape.layers_read)
        with self.running(runs):
            features: Tensor = self.feature_norm(self.fc(inputs.to(self.attention.dtype)))
        return features

    @torch.inference_mode()
    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> BlockState | None:
        """See DraftHead; the token of a pair matters only if a draft begins after it."""
        assert kv_cache is not None
        positions = on_device(pairs.positions, self.device)
        slots = on_device(pairs.slot_mapping, self.device)
        with self.running(pairs.adapter_runs):
            self._store_context(positions, slots, features, kv_cache)
        if not num_draft_tokens:
            return None
        size = self.shape.block_size
        with self.running(adapter_runs((chunk.adapter_id, size) for chunk in pairs.chunks)):
            outputs = self._run_blocks(pairs.chunks, kv_cache)[:, :num_draft_tokens]
        return self.state_of(pairs, outputs, self._block_logits(outputs))

    def state_of(self, pairs: ForwardBatch, outputs: Tensor, logits: Tensor) -> BlockState:
        """Return the state after pairs, of the outputs and logits of its blocks."""
        if self.markov is None:
            return BlockState(outputs, logits, None)
        anchors = self._index([chunk.token_ids[-1] for chunk in pairs.chunks])
        return BlockState(outputs, logits, self.markov.begin(anchors, outputs[:, 0]))

    def block_len(self, num_draft_tokens: int) -> int:
        """See DeviceBlockHead."""
        return self.shape.block_len(num_draft_tokens)

    def block_tokens(self, token_ids: Tensor, num_draft_tokens: int) -> Tensor:
        """See DeviceBlockHead."""
        masks = (0, self.shape.block_size - 1)
        return F.pad(token_ids[:, None], masks, value=self.shape.mask_token_id)

    def run_on_device(self, batch: AnyDeviceBatch, features: Tensor, kv_cache: Tensor) -> Tensor:
        """See DeviceKvHead. Pairs have no output, and a block reads none: returns `features`."""
        self._store_context(batch.positions, batch.slot_mapping, features, kv_cache)
        return features

    def run_block(self, batch: DeviceBatch, outputs: Tensor, kv_cache: Tensor) -> Tensor:
        """See DeviceBlockHead."""
        attention, size = self.attention, self.shape.block_size
        plans = {
            kind: attention.paged.plan_on_device(
                batch,
                attention.dtype,
                Visible(kind.window, FIRST_SLOT, 0 if kind.is_causal else size - 1),
            )
            for kind in set(self.visibilities)
        }
        rotation = attention.rotary.rotation(batch.positions - 1)
        x = self._embed(batch.input_ids)
        for index, (layer, kind) in enumerate(zip(self.layers, self.visibilities, strict=True)):
            x = layer(x, rotation, kv_cache[index], attention.paged, plans[kind])
        normed: Tensor = self.norm(x).view(batch.num_sequences, size, -1)
        return normed if self.shape.predicts_from_anchor else normed[:, 1:]

    def begin_on_device(self, outputs: Tensor, token_ids: Tensor) -> BlockState:
        """See DeviceBlockHead."""
        markov = None if self.markov is None else self.markov.begin(token_ids, outputs[:, 0])
        return BlockState(outputs, self._block_logits(outputs), markov)

    @torch.inference_mode()
    def logits(self, state: BlockState, index: int) -> Tensor:
        """See DraftHead."""
        logits = state.of_drafts(state.logits[:, index])
        if self.markov is not None and state.markov is not None:
            logits = logits + self.markov.bias(state.markov)
        return logits

    @torch.inference_mode()
    def advance(self, state: BlockState, token_ids: Sequence[int], index: int) -> BlockState:
        """See DraftHead."""
        return self.advance_on_device(state, self._index(token_ids), index)

    def advance_on_device(self, state: BlockState, token_ids: Tensor, index: int) -> BlockState:
        """See DeviceBlockHead."""
        if self.markov is None or state.markov is None:
            return state
        outputs = state.of_drafts(state.outputs[:, index + 1])
        return replace(state, markov=self.markov.advance(state.markov, token_ids, outputs))

    def select(self, state: BlockState, rows: Sequence[int]) -> BlockState:
        """See DraftHead."""
        return state.select(rows)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Return what the first layer reads of tokens [T], [T, hidden_size]."""
        embedded: Tensor = self.embed_tokens(token_ids)
        return embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale

    def _index(self, token_ids: Sequence[int]) -> Tensor:
        """Return token ids on the device, [len(token_ids)] int64."""
        return torch.tensor(token_ids, dtype=torch.int64, device=self.device)

    def _block_logits(self, outputs: Tensor) -> Tensor:
        """Return the logits [B, K, len(vocab_slice)] by one product, which reads the head once."""
        logits: Tensor = self.lm_head(outputs.flatten(0, 1)).unflatten(0, outputs.shape[:2])
        return logits

    def _store_context(
        self, positions: Tensor, slots: Tensor, features: Tensor, kv_cache: Tensor
    ) -> None:
        """Write the keys and values of features [T, hidden_size] for all layers.

        positions, slots: of the pairs [T], after the tokens of the features.
        """
        attention, inputs = self.attention, features.to(self.attention.dtype)
        rotation = attention.rotary.rotation(positions - 1)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            own = layer.grouped_attention
            own.store(inputs, rotation, kv_cache[index], attention.paged, slots)

    def _run_blocks(self, chunks: Sequence[Chunk], kv_cache: Tensor) -> Tensor:
        """Return the normed outputs of the blocks after B sequences, [B, K, hidden_size]."""
        size, num_masks = self.shape.block_size, self.shape.block_size - 1
        tokens = [
            token
            for chunk in chunks
            for token in (chunk.token_ids[-1], *[self.shape.mask_token_id] * num_masks)
        ]
        starts = torch.tensor([chunk.end - 1 for chunk in chunks], device=self.device)
        positions = (starts[:, None] + torch.arange(size, device=self.device)).flatten()
        rotation = self.attention.rotary.rotation(positions)
        contexts = [self._context(chunk) for chunk in chunks]
        x = self._embed(torch.tensor(tokens, device=self.device))
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x = self._run_layer(layer, index, x, rotation, contexts, kv_cache[index])
        outputs: Tensor = self.norm(x).view(len(chunks), size, -1)
        return outputs if self.shape.predicts_from_anchor else outputs[:, 1:]

    def _run_layer(
        self,
        layer: DecoderLayer,
        index: int,
        x: Tensor,  # [B * block_size, hidden_size]
        rotation: Rotation,
        contexts: Sequence[_Context],
        kv_cache: Tensor,  # [num_slots, 2, num_kv_heads, head_dim]
    ) -> Tensor:
        attention = layer.grouped_attention
        query, kv = _query_and_kv(attention, layer.input_norm(x), rotation)
        kind, size = self.visibilities[index], self.shape.block_size
        attended = [
            self._attend(own_query, torch.cat([kv_cache[each.slots], own_kv]), each.masks[kind])
            for each, own_query, own_kv in zip(
                contexts, query.split(size), kv.split(size), strict=True
            )
        ]
        x = attention.o_proj(torch.cat(attended).flatten(1), x)
        output: Tensor = layer.mlp(layer.mlp_norm(x), x)
        return output

    def _attend(self, query: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
        """Return [block_size, num_heads, head_dim]; kv: [S, 2, num_kv_heads, head_dim]."""
        keys, values = kv[:, :, self.kv_of_queries].permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1), keys, values, attn_mask=mask
        )
        return attended.transpose(0, 1)

    def _context(self, chunk: Chunk) -> _Context:
        """Return the slots of all pairs of a sequence, and the masks of its block."""
        slots = torch.arange(1, chunk.end, device=self.device)
        table = torch.tensor(list(chunk.block_table), device=self.device)
        pages = table[slots // self.block_size] * self.block_size + slots % self.block_size
        kinds = set(self.visibilities)
        return _Context(pages, {kind: self._mask(chunk.end - 1, kind) for kind in kinds})

    def _mask(self, num_features: int, kind: _Visibility) -> Tensor | None:
        """Return what a block after `num_features` tokens sees; positions count from 0."""
        if kind.window is None and not kind.is_causal:
            return None
        keys = torch.arange(num_features + self.shape.block_size, device=self.device)
        queries = keys[num_features:, None]
        is_masked = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=self.device)
        if kind.is_causal:
            is_masked |= keys > queries
        if kind.window is not None:
            is_masked |= keys <= queries - kind.window
        mask = torch.zeros(is_masked.shape, dtype=self.attention.dtype, device=self.device)
        return mask.masked_fill_(is_masked, float("-inf"))


def _query_and_kv(attention: Attention, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return queries [T, heads, head_dim] and keys and values [T, 2, kv heads, head_dim]."""
    num_kv = attention.num_kv_heads
    heads = attention.qkv_proj(x).view(len(x), -1, attention.head_dim)
    query, kv = heads.split((attention.num_heads, 2 * num_kv), dim=1)
    if attention.has_qk_norm:
        query.copy_(attention.query_norm(query))
        kv[:, :num_kv].copy_(attention.key_norm(kv[:, :num_kv]))
    rotation.apply_(heads[:, : attention.num_heads + num_kv])
    return query, kv.view(len(x), 2, num_kv, attention.head_dim)
