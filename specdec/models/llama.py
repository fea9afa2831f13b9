"""Llama decoder (Touvron et al. 2023) with tensor parallelism.

The other families are the same decoder with the biases, windows and traits of ModelConfig.

Each rank has the heads of its KV groups, its shard of the MLP's hidden units and its shard of the
vocabulary, and reads only these from the checkpoint. Hidden states are equal on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.config.engine import AdapterLimits
from specdec.kernels import AttentionPlan, Rotation
from specdec.kernels.moves import move_kv
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.device_batch import AnyDeviceBatch
from specdec.kernels.reference.forward_batch import ForwardBatch, HiddenStates, SlotMove, on_device
from specdec.kernels.reference.sample_rows import Argmax, RowArgmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import embedding_name, in_context
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.rope import Rope
from specdec.models.layers.decoder_layer import Attention, DecoderLayer, layer_attention
from specdec.models.layers.linear import (
    EmbeddingTable,
    VocabEmbedding,
    VocabHead,
    embedding_scale,
)
from specdec.models.layers.mixture import SparseMLP
from specdec.models.layers.norm import read_norm
from specdec.models.layers.one_block import OneBlock
from specdec.models.layers.rotary import RotaryEmbedding, query_scales
from specdec.models.lora.grouped_adapters import GroupedAdapters, grouped_adapters
from specdec.models.lora.torch_adapters import TorchAdapters
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.models.weights.kv_scales import read_kv_scales
from specdec.types.validation import require_range

_MAX_COPIED_SLOTS = 2**16
"""Slots of KV that torch's attention may copy for a ragged batch."""


class CausalDecoder(nn.Module):
    """One rank of the decoder. All calls that compute are collective."""

    _adapters: TorchAdapters | GroupedAdapters | None = None

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        group: TensorParallelGroup,
        max_model_len: int,
        block_size: int,
        output_tokens: Sequence[int] | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Read this rank's weights.

        output_tokens: those that have logits, ascending; the others have -inf. None for all.
        kv_dtype: of the KV cache; None for that of the model.

        Raises UnsupportedModelError for a checkpoint that does not match the configuration, and
        InvalidValueError for a `max_model_len` above `max_position_embeddings`.
        """
        super().__init__()
        require_range("max_model_len", max_model_len, 1, config.max_position_embeddings)
        self.config = config = in_context(config, max_model_len)
        self.dtype, self.device = reader.dtype, reader.device
        self.kv_dtype = reader.dtype if kv_dtype is None else kv_dtype
        self.windows = visible_windows(config, max_model_len)
        self.heads, self.head_dim = config.head_shards(group.size)[group.rank], config.head_dim
        self.vocab_slice = group.share_of(config.vocab_size)
        self.lm_head, table = _read_head_and_table(config, reader, self.vocab_slice, output_tokens)
        self.embed_tokens = VocabEmbedding(table, self.vocab_slice, group, reader.dtype)
        self._embedding_scale = embedding_scale(config.traits, reader.dtype)
        self.layers = self._read_layers(config, reader, group)
        if self.kv_dtype.itemsize == 1:
            _use_kv_scales(self.layers, reader, config.traits.names.attention)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm = read_norm(reader, config.traits.names.final_norm, size, eps, config.traits)
        self.rotaries = _rotaries(config, max_model_len, reader)
        self.rotary = self.rotaries[config.rope]
        self.query_scales = query_scales(config, max_model_len)
        self._query_table = self._placed_query_scales()
        self.backend = reader.backend
        self.attention = layer_attention(config, self.heads, self.backend, block_size, self.device)

    def _placed_query_scales(self) -> Tensor | None:
        """Return the factors of queries by position, [max_positions, 1, 1]; None without any."""
        table = next(iter(self.query_scales.values()), None)  # of which all are the same
        return None if table is None else table.to(self.device, self.dtype)[:, None, None]

    def _read_layers(
        self, config: ModelConfig, reader: CheckpointReader, group: TensorParallelGroup
    ) -> nn.ModuleList:
        kind = OneBlock if config.traits.has_one_block else DecoderLayer
        return nn.ModuleList(
            kind(config, reader, f"model.layers.{index}", group, index)
            for index in range(config.num_layers)
        )

    def enable_adapters(
        self, limits: AdapterLimits | None = None
    ) -> TorchAdapters | GroupedAdapters:
        """See Decoder. With limits, Triton's kernels run the adapters of a pass at once."""
        if limits is not None and self.backend.is_triton:
            self._adapters = grouped_adapters(self.layers, self.dtype, self.device, limits)
        else:
            self._adapters = TorchAdapters(self.layers, self.dtype, self.device)
        return self._adapters

    @property
    def adapter_places(self) -> Mapping[int, int] | None:
        """See DeviceDecoder."""
        return self._adapters.places if isinstance(self._adapters, GroupedAdapters) else None

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """Return zeros [layers with attention, num_slots, 2, this rank's KV heads, head_dim].

        With latents the third dimension is 1, as `PagedAttention.kv_parts`, and the last one
        `Latent.cached_dim`. Zeros, because padding
        reads slots that were never written.
        """
        latent = self.config.latent
        dim = self.head_dim if latent is None else latent.cached_dim
        of_token = (self.attention.kv_parts, len(self.heads.kv), dim)
        shape = (self.config.num_attention_layers, num_slots, *of_token)
        return torch.zeros(shape, dtype=self.kv_dtype, device=self.device)

    def forward(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """Write the batch's KV to `kv_cache`; return hidden states [T, hidden_size]."""
        return self.forward_with_taps(batch, kv_cache, ()).final

    @torch.inference_mode()
    def forward_with_taps(
        self, batch: ForwardBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """See Decoder."""
        plans = {
            window: self.attention.plan(batch, self.dtype, visible(window))
            for window in set(self.windows)
        }
        input_ids, positions = (
            on_device(indices, self.device) for indices in (batch.input_ids, batch.positions)
        )
        with self._adapters_of(batch):
            return self._run_layers(input_ids, positions, kv_cache, plans, taps)

    def _adapters_of(self, batch: ForwardBatch) -> AbstractContextManager[None]:
        """Select the adapters of a pass."""
        return nullcontext() if self._adapters is None else self._adapters.running(batch)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def fits_graphs(self) -> bool:
        """Return whether a pass of fixed shape can be a graph, in the time of its contexts."""
        mixtures = (each for each in self.layers.modules() if isinstance(each, SparseMLP))
        return not self.attention.copies_pages and all(each.fits_graphs for each in mixtures)

    def fits_ragged(self, num_tokens: int, num_blocks: int) -> bool:
        """Return whether a ragged batch may run: torch's attention copies a table for each token.

        num_blocks: of the longest table.
        """
        num_copied = num_tokens * num_blocks * self.attention.block_size
        return not self.attention.copies_pages or num_copied <= _MAX_COPIED_SLOTS

    @torch.inference_mode()
    def forward_on_device(self, batch: AnyDeviceBatch, kv_cache: Tensor) -> Tensor:
        """Run a batch without a value that the host has to read.

        Writes its KV to `kv_cache`; returns hidden states [T, hidden_size].
        """
        return self.tapped_on_device(batch, kv_cache, ()).final

    @torch.inference_mode()
    def tapped_on_device(
        self, batch: AnyDeviceBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """Run as `forward_on_device`. taps: as in `forward_with_taps`."""
        if self._adapters is not None:
            self._adapters.begin_device_pass(batch.adapters)
        plans = {
            window: self.attention.plan_on_device(batch, self.dtype, visible(window))
            for window in set(self.windows)
        }
        return self._run_layers(batch.input_ids, batch.positions, kv_cache, plans, taps)

    def _run_layers(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        kv_cache: Tensor,
        plans: Mapping[Window, AttentionPlan],  # by window
        taps: Sequence[int],
    ) -> HiddenStates:
        rotations: dict[Rope | None, Rotation | None] = {None: None}
        rotations |= {rope: each.rotation(positions) for rope, each in self.rotaries.items()}
        x = self.embed_tokens(input_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        tapped = x.new_empty(len(x), len(taps), x.shape[1])
        contexts = self._contexts(rotations, kv_cache, plans)
        scale = [] if self._query_table is None else [self._query_table[positions]]
        for index, (layer, context) in enumerate(zip(self.layers, contexts, strict=True)):
            copy_to_taps(x, index, taps, tapped)
            x = layer(x, *context, *(scale if index in self.query_scales else []))
        copy_to_taps(x, len(self.layers), taps, tapped)
        return HiddenStates(self.norm(x), tapped)

    def _contexts(
        self,
        rotations: Mapping[Rope | None, Rotation | None],
        kv_cache: Tensor,
        plans: Mapping[Window, AttentionPlan],
    ) -> Iterator[tuple[Any, ...]]:
        """Yield what each layer takes beside the residual stream."""
        for window, rope, cache in zip(self.windows, self.config.ropes, kv_cache, strict=True):
            yield rotations[rope], cache, self.attention, plans[window]

    def move_kv(self, kv_cache: Tensor, moves: Sequence[SlotMove]) -> None:
        """See Decoder."""
        move_kv(kv_cache, moves, self.backend)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)]; hidden: [R, hidden_size]."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def compute_logits_and_argmax(self, hidden: Tensor, argmax: Argmax) -> tuple[Tensor, RowArgmax]:
        """See Decoder."""
        logits = self.compute_logits(hidden)
        return logits, argmax(logits)


@dataclass(frozen=True)
class Chunk:
    """Chunked attention: a query sees the positions up to its own in its chunk of `size`."""

    size: int


Window = int | Chunk | None


def visible(window: Window) -> Visible:
    """Return what a query sees."""
    return Visible(chunk=window.size) if isinstance(window, Chunk) else Visible(window)


def visible_windows(config: ModelConfig, max_model_len: int) -> tuple[Window, ...]:
    """Return what queries see in each layer; chunks only where a context may have several."""
    chunk = config.traits.attention_chunk
    if chunk is None or max_model_len <= chunk:
        return config.sliding_windows
    return tuple(
        window if rope is None else Chunk(chunk)
        for window, rope in zip(config.sliding_windows, config.ropes, strict=True)
    )


def copy_to_taps(x: Tensor, layer: int, taps: Sequence[int], tapped: Tensor) -> None:
    """Copy the residual stream x [T, hidden_size] that enters `layer` to its taps.

    tapped: [T, len(taps), hidden_size].
    """
    for index, tap in enumerate(taps):
        if tap == layer:
            tapped[:, index] = x


def _read_head_and_table(
    config: ModelConfig,
    reader: CheckpointReader,
    rows: range,
    output_tokens: Sequence[int] | None,
) -> tuple[VocabHead, EmbeddingTable]:
    """Return this rank's rows of the output head and of the embedding, which may be one matrix."""
    shape = (config.vocab_size, config.hidden_size)
    embed_name = embedding_name(config, reader.tensors)
    head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
    head = VocabHead(reader, head_name, shape, rows, output_tokens, config.traits.logits)
    table = head.table if config.tie_word_embeddings else None
    return head, _read_table(reader, embed_name, shape, rows) if table is None else table


def _read_table(reader: CheckpointReader, name: str, shape: tuple[int, int], rows: range) -> Tensor:
    """Return this rank's rows of an embedding that is not tied, in memory of their own."""
    return reader.read(name, shape, rows=rows, dtype=reader.exact_dtype(name)).clone()


def _use_kv_scales(layers: nn.ModuleList, reader: CheckpointReader, name: str) -> None:
    """Read the scales of keys and values; latents have none in checkpoints. name: of attention."""
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(module, Attention):
                module.kv_scales = read_kv_scales(reader.tensors, f"model.layers.{index}.{name}")


def _rotaries(
    config: ModelConfig, max_model_len: int, reader: CheckpointReader
) -> dict[Rope | None, RotaryEmbedding]:
    """Return the rotations of each rope that a layer has."""
    return {
        rope: RotaryEmbedding(config.rotary_dim, max_model_len, rope, reader.dtype, reader.device)
        for rope in dict.fromkeys((config.rope, *config.ropes))
        if rope is not None
    }
