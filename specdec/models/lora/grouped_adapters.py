"""Adapters of a decoder in places of fixed size, all of which a pass updates at once on a device.

The host names the adapters of a pass by a tensor of places, so that a graph of the pass serves any
adapters, also those that are loaded later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from specdec.config.engine import AdapterLimits
from specdec.kernels.reference.forward_batch import ForwardBatch, on_device
from specdec.kernels.reference.lora import AddUpdates, LoraStack
from specdec.models.layers.latent_expansion import HeadMatrices, LatentExpansion
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from specdec.models.lora.torch_adapters import linears_of, scans_of
from specdec.models.lora.updated_matrix import UpdatedMatrix
from specdec.models.lora.updates import HeadUpdate, Linear, LowRankUpdate, by_half, placed


@dataclass
class _Pass:
    """The places of the tokens of the pass in progress, [T] int32; None without adapters."""

    _places: Tensor | None = None
    _of_heads: dict[int, Tensor] = field(default_factory=dict)  # by the number of heads

    @property
    def places(self) -> Tensor | None:
        return self._places

    @places.setter
    def places(self, places: Tensor | None) -> None:
        self._places = places
        self._of_heads.clear()

    def places_of_heads(self, num_heads: int) -> Tensor:
        """Return places in stacks with one for each head, of rows by head, [heads * T] int32."""
        places = self._places
        assert places is not None
        if num_heads not in self._of_heads:
            heads = torch.arange(num_heads, dtype=torch.int32, device=places.device)[:, None]
            of_heads = torch.where(places > 0, (places - 1) * num_heads + heads + 1, 0)
            self._of_heads[num_heads] = of_heads.to(torch.int32).flatten()
        return self._of_heads[num_heads]


@dataclass(frozen=True)
class _Context:
    """Kernel, places and memory of stacks, which the layers of a decoder share."""

    add: AddUpdates
    current: _Pass
    num_places: int
    rank: int
    dtype: torch.dtype
    device: torch.device

    def new_stack(self, num_inputs: int, columns: Sequence[range], num_heads: int = 1) -> LoraStack:
        """Return empty places, each of `num_heads` pairs of matrices."""
        count = self.num_places * num_heads
        return LoraStack.empty(count, self.rank, num_inputs, columns, self.dtype, self.device)


class GroupedMatrix(UpdatedMatrix):
    """A weight matrix, and the updates of it by all adapters."""

    def __init__(self, linear: ColumnParallelLinear | RowParallelLinear, context: _Context) -> None:
        """Let a linear layer take adapters."""
        super().__init__(linear.matrix)
        columns = [range(own.start, own.stop) for own, _ in placed(linear.projections)]
        self.stack = context.new_stack(len(linear.projections[0].inputs), columns)
        self._add, self._pass = context.add, context.current
        linear.matrix = self

    @property
    def stacks(self) -> Sequence[LoraStack]:
        """The places of the updates."""
        return (self.stack,)

    def write(self, index: int, update: LowRankUpdate | None) -> None:
        """Write an update to the place `index`, with zeros where it has nothing."""
        down, up = self.stack.downs[index], self.stack.ups[index]
        down.zero_()
        up.zero_()
        if update is None:
            return
        firsts = [each.start for each in self.stack.columns]
        for expansion in update.expansions:
            projection = firsts.index(expansion.outputs.start)
            ranks = update.shrink[expansion.ranks]
            first = projection * self.stack.rank
            down[first : first + len(ranks)] = ranks.to(down.dtype)
            up[: len(ranks), expansion.outputs] = expansion.weight.t().to(up.dtype)

    def _updated(self, y: Tensor, x: Tensor) -> Tensor:
        """See UpdatedMatrix."""
        if self._pass.places is not None:
            self._add(y, x, self._pass.places, self.stack)
        return y


class GroupedHeadMatrices:
    """The matrices of a rank's heads, and the updates of them by all adapters, HeadMatrices.

    Each head of an adapter has a separate place, so that the kernel of linear layers runs them:
    the rows of a head are adjacent. What all heads of an adapter share is stored for each.
    """

    def __init__(
        self, base: HeadMatrices, num_heads: int, stack: LoraStack, context: _Context
    ) -> None:
        self.base, self.stack = base, stack
        self._num_heads, self._add, self._pass = num_heads, context.add, context.current

    def multiply(self, x: Tensor) -> Tensor:
        """See HeadMatrices."""
        y = self.base.multiply(x)
        if self._pass.places is not None:
            assert y.is_contiguous(), "updates are added in place"
            places = self._pass.places_of_heads(self._num_heads)
            self._add(y.flatten(0, 1), x.flatten(0, 1), places, self.stack)
        return y

    def write(self, index: int, update: HeadUpdate | None) -> None:
        """Write the update of an adapter to the place `index`."""
        own = slice(index * self._num_heads, (index + 1) * self._num_heads)
        downs, ups = self.stack.downs[own], self.stack.ups[own]
        downs.zero_()
        ups.zero_()
        if update is not None:
            downs[:, : update.down.shape[1]] = update.down.to(downs.dtype)
            ups[:, : update.up.shape[2]] = update.up.transpose(1, 2).to(ups.dtype)


class GroupedExpansion:
    """Both halves of a LatentExpansion, and the updates of them by all adapters."""

    def __init__(self, layer: LatentExpansion, context: _Context) -> None:
        """Let the layer take adapters."""
        self._layer, halves, latent = layer, layer.in_torch, layer.latent
        count = layer.num_heads
        keys = context.new_stack(latent.plain_dim, [range(latent.rank)], count)
        values = context.new_stack(latent.rank, [range(latent.value_dim)], count)
        self._keys = GroupedHeadMatrices(halves.to_keys, count, keys, context)
        self._values = GroupedHeadMatrices(halves.to_values, count, values, context)
        halves.to_keys, halves.to_values = self._keys, self._values

    @property
    def stacks(self) -> Sequence[LoraStack]:
        """The places of the updates."""
        return (self._keys.stack, self._values.stack)

    def write(self, index: int, update: LowRankUpdate | None) -> None:
        """See GroupedMatrix."""
        keys, values = (None, None) if update is None else by_half(update, self._layer)
        self._keys.write(index, keys)
        self._values.write(index, values)


class GroupedAdapters:
    """The adapters in the memory of one rank of a decoder on a device; see AdapterStore.

    places: by adapter id, as in `AddUpdates`. The memory of all places is allocated at once.
    """

    def __init__(
        self,
        layers: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        limits: AdapterLimits,
        add: AddUpdates,
    ) -> None:
        """Let the linear layers in `layers` take adapters. dtype, device: of the activations."""
        self.dtype, self._device = dtype, device
        self.places: dict[int, int] = {}
        self._free = list(range(limits.max_loaded, 0, -1))  # the lowest is used first
        self._pass = _Pass()
        context = _Context(add, self._pass, limits.max_loaded, limits.device_rank, dtype, device)
        self._grouped: dict[Linear, GroupedMatrix | GroupedExpansion] = {
            each: GroupedExpansion(each, context)
            if isinstance(each, LatentExpansion)
            else GroupedMatrix(each, context)
            for each in linears_of(layers)
        }

    @property
    def linears(self) -> Sequence[Linear]:
        """See AdapterStore."""
        return list(self._grouped)

    @property
    def stacks(self) -> Sequence[LoraStack]:
        """The places of each layer."""
        return [stack for each in self._grouped.values() for stack in each.stacks]

    @contextmanager
    def running(self, batch: ForwardBatch) -> Iterator[None]:
        """Select the adapters of the tokens of a pass that the host has planned."""
        runs, places = batch.adapter_runs, None
        if runs:
            of_tokens = np.zeros(len(batch.input_ids), np.int32)
            for run in runs:
                of_tokens[run.begin : run.end] = self.places[run.adapter_id]
            places = on_device(of_tokens, self._device).to(torch.int32)
        self._pass.places = places
        try:
            yield
        finally:
            self._pass.places = None

    def begin_device_pass(self, places: Tensor | None) -> None:
        """Let the pass that follows run with the adapters in places [T], or without any."""
        self._pass.places = places

    def set(self, adapter_id: int, updates: Mapping[Linear, LowRankUpdate]) -> None:
        """See AdapterStore. Raises IndexError where all places are taken."""
        place = self._free.pop()
        self.places[adapter_id] = place
        for linear, grouped in self._grouped.items():
            grouped.write(place - 1, updates.get(linear))

    def drop(self, adapter_id: int) -> None:
        """See AdapterStore."""
        place = self.places.pop(adapter_id, None)
        if place is not None:
            self._free.append(place)


def grouped_adapters(
    layers: nn.Module, dtype: torch.dtype, device: torch.device, limits: AdapterLimits
) -> GroupedAdapters:
    """Return the adapters of a decoder on Triton's kernels."""
    from specdec.kernels.triton.lora import TritonLora  # imports Triton

    assert not scans_of(layers), "places are those of tokens"
    add = TritonLora(device)
    adapters = GroupedAdapters(layers, dtype, device, limits, add)
    for stack in adapters.stacks:
        add.prepare(stack)
    return adapters
