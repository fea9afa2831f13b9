"""Adapters of a decoder in torch: the definition that the native kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.kernels.forward_batch import AdapterRun, ModelInput
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from specdec.models.layers.matrix import Matrix
from specdec.models.layers.mixture import SparseMLP
from specdec.models.lora.updated_matrix import UpdatedMatrix
from specdec.models.lora.updates import Expansion, Linear, LowRankUpdate


@dataclass
class _Pass:
    """The runs of the pass in progress, which all matrices of a decoder share."""

    runs: Sequence[AdapterRun] = ()


@dataclass(frozen=True)
class _Update:
    """A LowRankUpdate in the layout of its products, like FullMatrix."""

    shrink: Tensor  # [inputs, sum of ranks]
    expansions: tuple[tuple[Expansion, Tensor], ...]  # weights [ranks, outputs]

    @classmethod
    def of(cls, update: LowRankUpdate, dtype: torch.dtype, device: torch.device) -> _Update:
        """Return an update of activations in `dtype` on `device`."""
        expansions = ((each, each.weight.t().to(device, dtype)) for each in update.expansions)
        return cls(update.shrink.t().to(device, dtype), tuple(expansions))


class AdaptedMatrix(UpdatedMatrix):
    """A weight matrix, and the updates of it by adapters, each for the rows of its sequences."""

    def __init__(self, base: Matrix, current: _Pass) -> None:
        super().__init__(base)
        self._pass = current
        self._updates: dict[int, _Update] = {}

    def set(self, adapter_id: int, update: _Update) -> None:
        """Add the update of an adapter."""
        self._updates[adapter_id] = update

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
            hidden = x[own] @ update.shrink
            for expansion, weight in update.expansions:
                y[own, expansion.outputs] += hidden[:, expansion.ranks] @ weight
        return y


class TorchAdapters:
    """The adapters in the memory of one rank of a decoder in torch; see AdapterStore."""

    def __init__(self, layers: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Let the linear layers in `layers` take adapters. dtype, device: of the activations."""
        self.dtype, self._device = dtype, device
        self._ids: set[int] = set()
        self._pass = _Pass()
        self._matrices: dict[Linear, AdaptedMatrix] = {}
        for linear in linears_of(layers):
            adapted = AdaptedMatrix(linear.matrix, self._pass)
            self._matrices[linear], linear.matrix = adapted, adapted

    @property
    def linears(self) -> Sequence[Linear]:
        """See AdapterStore."""
        return list(self._matrices)

    @contextmanager
    def running(self, batch: ModelInput) -> Iterator[None]:
        """Select the adapters of the tokens of a pass; no pass outside has any."""
        runs = batch.adapter_runs
        assert self._ids.issuperset(run.adapter_id for run in runs), "an adapter is not loaded"
        self._pass.runs = runs
        try:
            yield
        finally:
            self._pass.runs = ()

    def begin_device_pass(self, places: Tensor | None) -> None:
        """Let the pass that follows run without adapters, as all passes on a device do here."""
        assert places is None, "a step with adapters on the device"
        self._pass.runs = []

    def set(self, adapter_id: int, updates: Mapping[Linear, LowRankUpdate]) -> None:
        """See AdapterStore."""
        self._ids.add(adapter_id)
        for linear, update in updates.items():
            laid_out = _Update.of(update, self.dtype, self._device)
            self._matrices[linear].set(adapter_id, laid_out)

    def drop(self, adapter_id: int) -> None:
        """See AdapterStore."""
        self._ids.discard(adapter_id)
        for matrix in self._matrices.values():
            matrix.drop(adapter_id)


def linears_of(layers: nn.Module) -> list[Linear]:
    """Return the linear layers among the modules of `layers`, in order.

    Those of a mixture of experts are left out: each runs some of the tokens only.
    """
    kinds = (ColumnParallelLinear, RowParallelLinear)
    mixtures = [each for each in layers.modules() if isinstance(each, SparseMLP)]
    inner = {each for mixture in mixtures for each in mixture.modules()}
    return [each for each in layers.modules() if isinstance(each, kinds) and each not in inner]
