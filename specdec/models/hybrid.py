"""Decoder some of whose layers have a recurrence in place of attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import count
from typing import Any

from torch import Tensor

from specdec.kernels import AttentionPlan, Rotation
from specdec.kernels.reference.device_batch import AnyDeviceBatch
from specdec.kernels.reference.device_states import DeviceStatePool
from specdec.kernels.reference.forward_batch import ForwardBatch, HiddenStates
from specdec.kernels.reference.recurrent.recurrence import AnyStatePlan, LayerStates
from specdec.kernels.reference.state_pool import StatePlan, StatePool
from specdec.models.config.recurrent import Recurrent
from specdec.models.config.rope import Rope
from specdec.models.llama import CausalDecoder, Window
from specdec.models.lora.torch_adapters import TorchAdapters


class HybridDecoder(CausalDecoder):
    """One rank of a decoder with recurrent layers, whose states are in a pool beside the KV.

    Chunks of a batch name the slots of their sequences' states.
    """

    _plan: AnyStatePlan

    @cached_property
    def states(self) -> StatePool:
        """The states of sequences; of none before `enable_states`."""
        return self._new_states(0, 0)

    @property
    def _recurrent(self) -> Recurrent:
        assert self.config.recurrent is not None, "a hybrid has recurrent layers"
        return self.config.recurrent

    def enable_states(
        self, num_sequences: int, max_guesses: int, num_snapshots: int = 0
    ) -> StatePool:
        """Return the states of at most `num_sequences`; call it once, before the first pass.

        max_guesses: of a row.
        """
        self.states = self._new_states(num_sequences, max_guesses, num_snapshots)
        return self.states

    def _new_states(
        self, num_sequences: int, max_guesses: int, num_snapshots: int = 0
    ) -> StatePool:
        group = self.embed_tokens.group
        shape = self._recurrent.kind.state(self._recurrent.units(group.rank, group.size))
        kind, num_hidden = StatePool, shape.num_hidden
        if self.backend.is_triton:
            kind, num_hidden = DeviceStatePool, None
        return kind(
            len(self._recurrent.layers),
            shape.window,
            shape.num_inputs,
            shape.memory,
            num_slots=num_sequences,
            max_guesses=max_guesses,
            num_snapshots=num_snapshots,
            num_hidden=num_hidden,
            dtype=self.dtype,
            device=self.device,
        )

    def forward_with_taps(
        self, batch: ForwardBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """See Decoder."""
        if isinstance(self.states, DeviceStatePool):
            self._plan = self.states.plan_batch(batch)
        else:
            self._plan = self.states.plan(batch)
        return super().forward_with_taps(batch, kv_cache, taps)

    def _adapters_of(self, batch: ForwardBatch) -> AbstractContextManager[None]:
        """See CausalDecoder; the inputs of recurrences have those of their sequences."""
        if isinstance(self._adapters, TorchAdapters):
            assert isinstance(self._plan, StatePlan), "adapters beside kernels of a GPU"
            return self._adapters.running(batch, self._plan)
        return super()._adapters_of(batch)

    @property
    def has_fixed_shapes(self) -> bool:
        """Return whether passes of fixed shape are possible: torch's recurrences read the host."""
        return isinstance(self.states, DeviceStatePool)

    def tapped_on_device(
        self, batch: AnyDeviceBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """See CausalDecoder; the batch has the rows of states."""
        assert isinstance(self.states, DeviceStatePool)
        assert batch.states is not None, "a batch without rows of states"
        self._plan = self.states.plan_rows(batch.states, len(batch.input_ids))
        return super().tapped_on_device(batch, kv_cache, taps)

    def _contexts(
        self,
        rotations: Mapping[Rope | None, Rotation | None],
        kv_cache: Tensor,
        plans: Mapping[Window, AttentionPlan],
    ) -> Iterator[tuple[Any, ...]]:
        """Yield what each layer takes: attention has KV, a recurrence states, an MLP nothing."""
        recurrent, caches, states = self._recurrent, iter(kv_cache), count()
        for index, (window, rope) in enumerate(zip(self.windows, self.config.ropes, strict=True)):
            of_attention, of_recurrence = tuple[Any, ...](), tuple[Any, ...]()
            if index not in recurrent.without_attention:
                of_attention = (rotations[rope], next(caches), self.attention, plans[window])
            if index in recurrent.layers:
                of_recurrence = (LayerStates(self.states, next(states), self._plan),)
            has_both = recurrent.beside is not None
            yield (of_attention, of_recurrence) if has_both else of_attention + of_recurrence
