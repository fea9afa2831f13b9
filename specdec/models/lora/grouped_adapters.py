"""Adapters of a decoder in places of fixed size, all of which a pass updates at once on a device.

The host names the adapters of a pass by a tensor of places, so that a graph of the pass serves any
adapters, also those that are loaded later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from specdec.config.engine import AdapterLimits
from specdec.kernels.forward_batch import ModelInput, on_device
from specdec.kernels.lora import AddUpdates, LoraStack
from specdec.models.layers.matrix import Matrix
from specdec.models.lora.torch_adapters import linears_of
from specdec.models.lora.updated_matrix import UpdatedMatrix
from specdec.models.lora.updates import Linear, LowRankUpdate, placed


@dataclass
class _Pass:
    """The places of the tokens of the pass in progress, [T] int32; None without adapters."""

    places: Tensor | None = None


class GroupedMatrix(UpdatedMatrix):
    """A weight matrix, and the updates of it by all adapters."""

    def __init__(self, base: Matrix, stack: LoraStack, add: AddUpdates, current: _Pass) -> None:
        super().__init__(base)
        self.stack, self._add, self._pass = stack, add, current

    def _updated(self, y: Tensor, x: Tensor) -> Tensor:
        """See UpdatedMatrix."""
        if self._pass.places is not None:
            self._add(y, x, self._pass.places, self.stack)
        return y


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
        self._stacks: dict[Linear, LoraStack] = {}
        rank = limits.device_rank
        for linear in linears_of(layers):
            columns = [range(own.start, own.stop) for own, _ in placed(linear.projections)]
            num_inputs = len(linear.projections[0].inputs)
            stack = LoraStack.empty(limits.max_loaded, rank, num_inputs, columns, dtype, device)
            self._stacks[linear] = stack
            linear.matrix = GroupedMatrix(linear.matrix, stack, add, self._pass)

    @property
    def linears(self) -> Sequence[Linear]:
        """See AdapterStore."""
        return list(self._stacks)

    @property
    def stacks(self) -> Sequence[LoraStack]:
        """The places of each layer."""
        return list(self._stacks.values())

    @contextmanager
    def running(self, batch: ModelInput) -> Iterator[None]:
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
        for linear, stack in self._stacks.items():
            _write(stack, place - 1, updates.get(linear))

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

    add = TritonLora(device)
    adapters = GroupedAdapters(layers, dtype, device, limits, add)
    for stack in adapters.stacks:
        add.prepare(stack)
    return adapters


def _write(stack: LoraStack, index: int, update: LowRankUpdate | None) -> None:
    """Write an update to a place, with zeros where it has nothing."""
    down, up = stack.downs[index], stack.ups[index]
    down.zero_()
    up.zero_()
    if update is None:
        return
    firsts = [each.start for each in stack.columns]
    for expansion in update.expansions:
        projection = firsts.index(expansion.outputs.start)
        ranks = update.shrink[expansion.ranks]
        first = projection * stack.rank
        down[first : first + len(ranks)] = ranks.to(down.dtype)
        up[: len(ranks), expansion.outputs] = expansion.weight.t().to(up.dtype)
