"""Heads whose linear layers run each row with the adapter of its sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch, adapter_runs
from specdec.models.lora.torch_adapters import TorchAdapters
from specdec.models.lora.updates import AdapterStore, Linear, LowRankUpdate
from specdec.models.weights.checkpoint import CPU


class RowState(NamedTuple):
    """State of B sequences in a head without KV.

    values: [B, state_size]. adapter_ids: of each sequence; none in passes of fixed shape.
    """

    values: Tensor
    adapter_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, values: Tensor, pairs: ForwardBatch) -> RowState:
        """Return the state of the sequences of pairs."""
        return cls(values, tuple(chunk.adapter_id for chunk in pairs.chunks))

    @property
    def runs(self) -> list[AdapterRun]:
        """The adapters of the rows."""
        return adapter_runs((adapter_id, 1) for adapter_id in self.adapter_ids)

    def select(self, rows: Sequence[int]) -> RowState:
        """Return the state of some sequences."""
        ids = tuple(self.adapter_ids[row] for row in rows) if self.adapter_ids else ()
        return RowState(self.values[list(rows)], ids)


class AdaptedNetwork(nn.Module):
    """A network on torch; on a CPU its passes select the adapters of their rows by `running`."""

    _adapters: TorchAdapters | None = None

    @property
    def adapted_parts(self) -> nn.Module:
        """The modules whose linear layers adapters may update."""
        return self

    def enable_adapters(self, dtype: torch.dtype) -> AdapterStore:
        """See DraftHead."""
        return self.adapt(self.adapted_parts, dtype)

    def adapt(self, parts: nn.Module, dtype: torch.dtype) -> AdapterStore:
        """Let the linear layers among the modules of `parts` alone take adapters."""
        self._adapters = TorchAdapters(parts, dtype, CPU)
        return self._adapters

    def updating(self, runs: Sequence[AdapterRun]) -> Sequence[AdapterRun]:
        """Return the runs of adapters that update a layer, which alone change results."""
        return () if self._adapters is None else self._adapters.updating(runs)

    def running(self, runs: Sequence[AdapterRun]) -> AbstractContextManager[None]:
        """Select the adapters of the rows of the layers that run inside."""
        return nullcontext() if self._adapters is None else self._adapters.running_rows(runs)


class JoinedAdapters:
    """The adapters of a network of which some layers run on torch and others natively.

    See AdapterStore.
    """

    def __init__(self, *parts: AdapterStore) -> None:
        self._parts = parts
        self.dtype = parts[0].dtype

    @property
    def linears(self) -> Sequence[Linear]:
        """See AdapterStore."""
        return [linear for part in self._parts for linear in part.linears]

    def set(self, adapter_id: int, updates: Mapping[Linear, LowRankUpdate]) -> None:
        """See AdapterStore."""
        for part in self._parts:
            own = {each: updates[each] for each in part.linears if each in updates}
            part.set(adapter_id, own)

    def drop(self, adapter_id: int) -> None:
        """See AdapterStore."""
        for part in self._parts:
            part.drop(adapter_id)
