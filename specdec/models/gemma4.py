"""Decoder whose layers differ in the shape of attention and read each other's KV (Gemma 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from specdec.kernels import AttentionPlan, PagedAttention, Rotation
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.forward_batch import ForwardBatch, HiddenStates, on_device
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.attention.varied_layers import AttentionShape, VariedLayers
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.rope import Rope
from specdec.models.layers.decoder_layer import layer_attention
from specdec.models.layers.gemma4_layer import Gemma4Layer, LayerPass
from specdec.models.layers.linear import ColumnParallelLinear, VocabEmbedding, WeightPart
from specdec.models.layers.norm import RMSNorm
from specdec.models.layers.rotary import RotaryEmbedding
from specdec.models.llama import CausalDecoder, copy_to_taps
from specdec.models.weights.checkpoint import CheckpointReader

_Kind = tuple[AttentionShape, int | None]
"""The shape and the window of a layer's attention; a pass has one plan for each."""


class Gemma4Decoder(CausalDecoder):
    """One rank of a decoder of VariedLayers, by torch.

    The KV cache has a row of numbers for the keys of a slot and one for its values, in each layer
    that has its own; layers use as many of them as their heads have.
    """

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
        """See CausalDecoder."""
        super().__init__(config, reader, group, max_model_len, block_size, output_tokens, kv_dtype)
        varied, self._group = self._varied, group
        self._inputs = _InputVectors(config, varied, reader, group) if varied.input_size else None
        self._attention: dict[AttentionShape, PagedAttention] = {}
        for index, shape in enumerate(varied.shapes):
            heads = varied.shard(index, config.num_heads, group.rank, group.size)
            sized = replace(config, head_dim=shape.head_dim)
            self._attention[shape] = layer_attention(
                sized, heads, self.backend, block_size, self.device
            )
        self._kinds = tuple(zip(varied.shapes, config.sliding_windows, strict=True))
        dims = (shape.head_dim for shape in varied.shapes)
        self._rotary_kinds = tuple(zip(config.ropes, dims, strict=True))
        self._rotations = {
            (rope, dim): RotaryEmbedding(dim, max_model_len, rope, self.dtype, self.device)
            for rope, dim in set(self._rotary_kinds)
            if rope is not None
        }

    @property
    def _varied(self) -> VariedLayers:
        assert self.config.varied is not None, "the layers of the model do not differ"
        return self.config.varied

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """Return zeros [layers with keys and values, num_slots, 2, numbers]."""
        group, varied = self._group, self._varied
        width = varied.kv_width(self.config.num_heads, group.rank, group.size)
        shape = (len(varied.kv_places), num_slots, 2, width)
        return torch.zeros(shape, dtype=self.kv_dtype, device=self.device)

    @torch.inference_mode()
    def forward_with_taps(
        self, batch: ForwardBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """See Decoder."""
        plans = {
            (shape, window): self._attention[shape].plan(batch, self.dtype, Visible(window))
            for shape, window in set(self._kinds)
        }
        ids, positions = (
            on_device(indices, self.device) for indices in (batch.input_ids, batch.positions)
        )
        return self._run(ids, positions, kv_cache, plans, taps)

    def _run(
        self,
        ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        kv_cache: Tensor,
        plans: Mapping[_Kind, AttentionPlan],
        taps: Sequence[int],
    ) -> HiddenStates:
        rotations = {kind: each.rotation(positions) for kind, each in self._rotations.items()}
        x = self.embed_tokens(ids) * self._embedding_scale
        inputs = None if self._inputs is None else self._inputs(ids, x)
        tapped = x.new_empty(len(x), len(taps), x.shape[1])
        kv: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            copy_to_taps(x, index, taps, tapped)
            vectors = None if inputs is None else inputs[:, index]
            x = layer(x, self._layer_pass(index, rotations, kv_cache, plans, kv, vectors))
        copy_to_taps(x, len(self.layers), taps, tapped)
        return HiddenStates(self.norm(x), tapped)

    def _layer_pass(
        self,
        index: int,
        rotations: Mapping[tuple[Rope, int], Rotation],
        kv_cache: Tensor,
        plans: Mapping[_Kind, AttentionPlan],
        kv: dict[int, Tensor],
        inputs: Tensor | None,
    ) -> LayerPass:
        kind, varied = self._kinds[index], self._varied
        attention, (rope, dim) = self._attention[kind[0]], self._rotary_kinds[index]
        place = varied.kv_places[varied.kv_layers[index]]
        own = kv_cache[place, ..., : attention.num_kv_heads * dim].unflatten(-1, (-1, dim))
        rotation = None if rope is None else rotations[rope, dim]
        return LayerPass(rotation, own, attention, plans[kind], kv, inputs)

    def _read_layers(
        self, config: ModelConfig, reader: CheckpointReader, group: TensorParallelGroup
    ) -> nn.ModuleList:
        assert config.varied is not None
        layers = range(config.num_layers)
        return nn.ModuleList(
            Gemma4Layer(config, config.varied, each, reader, group) for each in layers
        )


class _InputVectors(nn.Module):
    """A vector of each token for each layer: of its table, and a projection of its embedding."""

    def __init__(
        self,
        config: ModelConfig,
        varied: VariedLayers,
        reader: CheckpointReader,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        self.size, hidden = varied.input_size, config.hidden_size
        width, name = len(varied.shapes) * self.size, "model.embed_tokens_per_layer.weight"
        rows = group.share_of(varied.num_inputs)
        table = reader.read(
            name, (varied.num_inputs, width), rows=rows, dtype=reader.exact_dtype(name)
        ).clone()
        self.table = VocabEmbedding(table, rows, group, reader.dtype)
        part = WeightPart("model.per_layer_model_projection", width, range(width))
        self.projection = ColumnParallelLinear(reader, hidden, [part])
        norm = "model.per_layer_projection_norm.weight"
        self.norm = RMSNorm(reader, norm, self.size, config.rms_norm_eps)
        self.projection_scale = hidden**-0.5
        self.table_scale = float(torch.tensor(math.sqrt(self.size), dtype=reader.dtype))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return [T, layers, size]. ids: [T] int64. x: their embeddings [T, hidden_size]."""
        projected = self.projection(x) * self.projection_scale
        found = self.norm(projected.unflatten(1, (-1, self.size)))
        table = self.table(ids) * self.table_scale
        both: Tensor = (found + table.unflatten(1, (-1, self.size))) * 2**-0.5
        return both
