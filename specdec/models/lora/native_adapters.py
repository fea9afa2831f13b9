"""Adapters of a decoder on the native kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from specdec.kernels.cpu import MatrixStruct
from specdec.kernels.cpu.lora import (
    HeadUpdateStruct,
    LatentUpdateStruct,
    LoraArrays,
    LoraExpansionStruct,
    LoraLayerStruct,
    LoraUpdateStruct,
)
from specdec.models.layers.decoder_layer import Attention
from specdec.models.layers.latent_attention import LatentAttention
from specdec.models.layers.latent_expansion import LatentExpansion
from specdec.models.layers.linear import RowParallelLinear
from specdec.models.layers.mlp import MLP
from specdec.models.layers.recurrences.recurrent_layer import RecurrentLayer
from specdec.models.lora.updates import Linear, LowRankUpdate, by_half, native_update


class AdaptedLayer(Protocol):
    """A layer of a decoder or a draft head."""

    @property
    def mixer(self) -> Attention | LatentAttention | RecurrentLayer: ...

    @property
    def mlp(self) -> nn.Module: ...


class NativeAdapters:
    """The adapters in the memory of one rank of a decoder on native kernels; see AdapterStore.

    Products with them are float32 sums for every data type of the model; 16-bit values stay in 16
    bits.
    """

    def __init__(
        self,
        layers: Sequence[AdaptedLayer],
        dtype: torch.dtype,
        loaded: dict[int, LoraArrays],
        fusion: RowParallelLinear | None = None,
    ) -> None:
        """dtype: the model's. loaded: arrays by adapter id, which change here for a kernel.

        fusion: of a draft head, the projection that makes the input of its first layer.
        """
        self.dtype = dtype
        self._by_layer = [list(_linears_by_name(layer)) for layer in layers]
        if fusion is not None:
            self._by_layer[0].append(("fusion", fusion))
        self._loaded = loaded

    @property
    def linears(self) -> Sequence[Linear]:
        """See AdapterStore."""
        return [linear for layer in self._by_layer for _, linear in layer]

    def set(self, adapter_id: int, updates: Mapping[Linear, LowRankUpdate]) -> None:
        """See AdapterStore."""
        kept: list[object] = []
        structs = (LoraLayerStruct * len(self._by_layer))()
        for struct, layer in zip(structs, self._by_layer, strict=True):
            for name, linear in layer:
                if (update := updates.get(linear)) is not None:
                    setattr(struct, name, _struct(linear, update, kept))
        width = max((_width(linear, update) for linear, update in updates.items()), default=0)
        self._loaded[adapter_id] = LoraArrays(structs, width, tuple(kept))

    def drop(self, adapter_id: int) -> None:
        """See AdapterStore."""
        self._loaded.pop(adapter_id, None)


def _linears_by_name(layer: AdaptedLayer) -> Iterator[tuple[str, Linear]]:
    """Yield the linear layers of a decoder layer by their names in LoraLayerStruct.

    Experts have none: an adapter cannot update them.
    """
    mixer = layer.mixer
    if isinstance(mixer, Attention | LatentAttention):
        yield "qkv", mixer.qkv_proj
        yield "output", mixer.o_proj
    else:
        yield "qkv", mixer.in_proj
        yield "output", mixer.out_proj
    if isinstance(mixer, LatentAttention):
        yield "expansion", mixer.expansion
        if mixer.query_up is not None:
            yield "query_up", mixer.query_up
    if isinstance(layer.mlp, MLP):
        yield "gate_up", layer.mlp.gate_up_proj
        yield "down", layer.mlp.down_proj


def _width(linear: Linear, update: LowRankUpdate) -> int:
    """Return the products with A of a token: each head has its own in the expansion of latents."""
    num_heads = linear.num_heads if isinstance(linear, LatentExpansion) else 1
    return len(update.shrink) * num_heads


def _struct(
    linear: Linear, update: LowRankUpdate, kept: list[object]
) -> LoraUpdateStruct | LatentUpdateStruct:
    if isinstance(linear, LatentExpansion):
        return _latent_struct(linear, update, kept)
    return _update_struct(update, kept)


def _latent_struct(
    layer: LatentExpansion, update: LowRankUpdate, kept: list[object]
) -> LatentUpdateStruct:
    keys, values = by_half(update, layer)
    heads = (HeadUpdateStruct * layer.num_heads)()
    kept.append(heads)
    for struct, down, up in zip(heads, keys.down, values.up, strict=True):
        struct.from_query, struct.to_value = _packed(down, kept), _packed(up, kept)
    return LatentUpdateStruct(_packed(values.down[0], kept), _packed(keys.up[0], kept), heads)


def _update_struct(update: LowRankUpdate, kept: list[object]) -> LoraUpdateStruct:
    expansions = (LoraExpansionStruct * len(update.expansions))()
    kept.append(expansions)
    for struct, expansion in zip(expansions, update.expansions, strict=True):
        struct.weight = _packed(expansion.weight, kept)
        struct.first_rank, struct.first_output = expansion.ranks.start, expansion.outputs.start
    return LoraUpdateStruct(_packed(update.shrink, kept), expansions, len(expansions))


def _packed(weight: Tensor, kept: list[object]) -> MatrixStruct:
    """Return the packed struct of a weight [out_features, in_features], which `kept` owns."""
    matrix = native_update(weight)
    kept.append(matrix)
    return matrix.native
