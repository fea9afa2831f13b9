"""Adapters of a decoder in torch: the definition that the native kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch
from specdec.kernels.reference.state_pool import StatePlan
from specdec.models.layers.latent_expansion import HeadMatrices, LatentExpansion
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from specdec.models.layers.matrix import FullMatrix, Matrix, NativeMatrix
from specdec.models.layers.mixture import SparseMLP
from specdec.models.layers.recurrences.selective_scan import SelectiveScanLayer
from specdec.models.lora.updated_matrix import UpdatedMatrix
from specdec.models.lora.updates import (
    Expansion,
    HeadUpdate,
    Linear,
    LowRankUpdate,
    by_half,
    native_update,
)


@dataclass
class _Pass:
    """Type and device of activations, and runs, which all matrices of a decoder share.

    runs: of the pass in progress.
    """

    dtype: torch.dtype
    device: torch.device
    runs: Sequence[AdapterRun] = ()


@dataclass(frozen=True)
class _Update:
    """A LowRankUpdate in the layout of its products."""

    shrink: Matrix  # [sum of ranks, inputs]
    expansions: tuple[tuple[Expansion, Matrix], ...]  # [outputs, ranks]


class AdaptedMatrix(UpdatedMatrix):
    """A weight matrix, and the updates of it by adapters, each for the rows of its sequences.

    Updates of a native matrix are native: a row's result is the same bits in any batch.
    """

    def __init__(self, base: Matrix, current: _Pass) -> None:
        super().__init__(base)
        self._pass = current
        self._updates: dict[int, _Update] = {}

    def set(self, adapter_id: int, update: LowRankUpdate) -> None:
        """Add the update of an adapter."""
        expansions = ((each, self._matrix(each.weight)) for each in update.expansions)
        self._updates[adapter_id] = _Update(self._matrix(update.shrink), tuple(expansions))

    def drop(self, adapter_id: int) -> None:
        """Forget the update of an adapter, if there is one."""
        self._updates.pop(adapter_id, None)

    def _updated(self, y: Tensor, x: Tensor) -> Tensor:
        """See UpdatedMatrix."""
        for run in self._pass.runs:
            update = self._updates.get(run.adapter_id)
            if update is None:
                continue  # the adapter leaves this layer as it is
            own = slice(run.begin, run.end)
            hidden = update.shrink.multiply(x[own])
            for expansion, matrix in update.expansions:
                y[own, expansion.outputs] += matrix.multiply(hidden[:, expansion.ranks])
        return y

    def _matrix(self, weight: Tensor) -> Matrix:
        if isinstance(self.base, NativeMatrix):
            return native_update(weight)
        shape = (weight.shape[0], weight.shape[1])
        return FullMatrix([weight.to(self._pass.device)], shape, self._pass.dtype)


class AdaptedHeadMatrices:
    """The matrices of a rank's heads, and the updates of them by adapters, HeadMatrices."""

    def __init__(self, base: HeadMatrices, current: _Pass) -> None:
        self.base = base
        self._pass = current
        self._updates: dict[int, tuple[Tensor, Tensor]] = {}

    def multiply(self, x: Tensor) -> Tensor:
        """See HeadMatrices."""
        y = self.base.multiply(x)
        for run in self._pass.runs:
            if (update := self._updates.get(run.adapter_id)) is not None:
                own, (down, up) = slice(run.begin, run.end), update
                y[:, own] += torch.matmul(torch.matmul(x[:, own], down), up)
        return y

    def set(self, adapter_id: int, update: HeadUpdate) -> None:
        """Add the update of an adapter."""
        down, up = (
            each.transpose(1, 2).to(self._pass.device, self._pass.dtype)
            for each in (update.down, update.up)
        )
        self._updates[adapter_id] = down, up

    def drop(self, adapter_id: int) -> None:
        """Forget the update of an adapter, if there is one."""
        self._updates.pop(adapter_id, None)


class AdaptedExpansion:
    """Both halves of a LatentExpansion, and the updates of them by adapters."""

    def __init__(self, layer: LatentExpansion, current: _Pass) -> None:
        """Let the layer take adapters."""
        self._layer, halves = layer, layer.in_torch
        self._keys = AdaptedHeadMatrices(halves.to_keys, current)
        self._values = AdaptedHeadMatrices(halves.to_values, current)
        halves.to_keys, halves.to_values = self._keys, self._values

    def set(self, adapter_id: int, update: LowRankUpdate) -> None:
        """Add the update of an adapter."""
        keys, values = by_half(update, self._layer)
        self._keys.set(adapter_id, keys)
        self._values.set(adapter_id, values)

    def drop(self, adapter_id: int) -> None:
        """Forget the update of an adapter, if there is one."""
        self._keys.drop(adapter_id)
        self._values.drop(adapter_id)


class TorchAdapters:
    """The adapters in the memory of one rank of a decoder in torch; see AdapterStore."""

    def __init__(self, layers: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Let the linear layers in `layers` take adapters. dtype, device: of the activations."""
        self.dtype = dtype
        self._ids: dict[int, bool] = {}  # whether the adapter updates a layer
        self._pass = _Pass(dtype, device)
        self._hidden, self._inputs = _Pass(dtype, device), _Pass(dtype, device)
        scans = scans_of(layers)
        passes: dict[Linear, _Pass] = {each.in_proj: self._hidden for each in scans}
        passes |= {part: self._inputs for each in scans for part in (each.x_proj, each.dt_proj)}
        self._adapted = {
            each: _adapted(each, passes.get(each, self._pass)) for each in linears_of(layers)
        }

    @property
    def linears(self) -> Sequence[Linear]:
        """See AdapterStore."""
        return list(self._adapted)

    @contextmanager
    def running(self, batch: ForwardBatch, plan: StatePlan | None = None) -> Iterator[None]:
        """Select the adapters of the tokens of a pass; no pass outside has any.

        plan: of its recurrences, which also run replayed inputs.
        """
        with self.running_rows(batch.adapter_runs):
            if plan is not None:
                self._hidden.runs = plan.hidden_runs(batch)
                self._inputs.runs = plan.input_runs(batch)
            try:
                yield
            finally:
                self._hidden.runs = self._inputs.runs = ()

    @contextmanager
    def running_rows(self, runs: Sequence[AdapterRun]) -> Iterator[None]:
        """Select the adapters of the rows of some layers; see `running`."""
        self._pass.runs = self.updating(runs)
        try:
            yield
        finally:
            self._pass.runs = ()

    def updating(self, runs: Sequence[AdapterRun]) -> list[AdapterRun]:
        """Return the runs of adapters that update a layer."""
        return [run for run in runs if self._ids[run.adapter_id]]

    def begin_device_pass(self, places: Tensor | None) -> None:
        """Let the pass that follows run without adapters, as all passes on a device do here."""
        assert places is None, "a step with adapters on the device"
        self._pass.runs = []

    def set(self, adapter_id: int, updates: Mapping[Linear, LowRankUpdate]) -> None:
        """See AdapterStore."""
        self._ids[adapter_id] = bool(updates)
        for linear, update in updates.items():
            self._adapted[linear].set(adapter_id, update)

    def drop(self, adapter_id: int) -> None:
        """See AdapterStore."""
        self._ids.pop(adapter_id, None)
        for adapted in self._adapted.values():
            adapted.drop(adapter_id)


def _adapted(linear: Linear, current: _Pass) -> AdaptedMatrix | AdaptedExpansion:
    """Let a layer take adapters, and return what holds their updates."""
    if isinstance(linear, LatentExpansion):
        return AdaptedExpansion(linear, current)
    matrix = AdaptedMatrix(linear.matrix, current)
    linear.matrix = matrix
    return matrix


def linears_of(layers: nn.Module) -> list[Linear]:
    """Return the linear layers among the modules of `layers`, in order.

    Those of a mixture of experts are left out: each runs some of the tokens only.
    """
    kinds = (ColumnParallelLinear, RowParallelLinear, LatentExpansion)
    mixtures = [each for each in layers.modules() if isinstance(each, SparseMLP)]
    inner = {each for mixture in mixtures for each in mixture.modules()}
    return [each for each in layers.modules() if isinstance(each, kinds) and each not in inner]


def scans_of(layers: nn.Module) -> list[SelectiveScanLayer]:
    """Return the layers whose linear layers also run what is replayed."""
    return [each for each in layers.modules() if isinstance(each, SelectiveScanLayer)]
