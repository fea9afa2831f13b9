"""Heads whose linear layers run each row with the adapter of its sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import (
    AdapterRun,
    ForwardBatch,
    adapter_runs,
    on_device,
)
from specdec.models.heads.formats.shape import HeadShape
from specdec.models.heads.networks.base import DeviceDrafts, HeadCapabilities
from specdec.models.heads.networks.target import TargetRank
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


class RowHead(AdaptedNetwork):
    """One rank of a head without KV, a DeviceStateHead; its state is a RowState.

    Subclasses read `lm_heads`, what comes before these, and implement `_next` if they read drafts.
    """

    num_kv_layers = 0
    capabilities = HeadCapabilities(on_device=DeviceDrafts.STATES)
    reads_drafts = True
    target_ids: Tensor | None = None
    blocks: nn.ModuleList
    lm_heads: nn.ModuleList

    def __init__(self, shape: HeadShape, target: TargetRank) -> None:
        super().__init__()
        self.taps, self.feature_size = shape.taps, shape.feature_size
        self.max_draft_tokens = shape.max_draft_tokens
        self.vocab_size = shape.draft_vocab_size
        self.vocab_slice = target.group.share_of(shape.draft_vocab_size)
        self.device, self.dtype = target.device, target.dtype

    def new_kv_cache(self, num_slots: int) -> None:
        """See DraftHead."""

    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """See DraftHead."""
        del runs
        return states.to(self.dtype)

    @torch.inference_mode()
    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> RowState:
        """See DraftHead."""
        state = RowState.of(features.to(self.dtype), pairs)
        if not self.reads_drafts:
            return state
        return self._next(state, on_device(pairs.input_ids, self.device), 0)

    def begin_on_device(self, features: Tensor, token_ids: Tensor) -> RowState:
        """See DeviceStateHead."""
        return self._next(RowState(features.to(self.dtype)), token_ids, 0)

    @torch.inference_mode()
    def logits(self, state: RowState, index: int) -> Tensor:
        """See DraftHead."""
        with self.running(state.runs):
            hidden = self.blocks[index](state.values)
        logits: Tensor = self.lm_heads[index](hidden)
        return logits

    @torch.inference_mode()
    def advance(self, state: RowState, token_ids: Sequence[int], index: int) -> RowState:
        """See DraftHead."""
        if not self.reads_drafts:
            return state
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        return self._next(state, tokens, index + 1)

    def advance_on_device(self, state: RowState, token_ids: Tensor, index: int) -> RowState:
        """See DeviceStateHead."""
        return self._next(state, token_ids, index + 1)

    def select(self, state: RowState, rows: Sequence[int]) -> RowState:
        """See DraftHead."""
        return state.select(rows)

    def _next(self, state: RowState, token_ids: Tensor, index: int) -> RowState:
        """Return the state that head `index` drafts from; token_ids: [B], those before its draft.

        state: of the head before it; of the first one the features.
        """
        return state


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
