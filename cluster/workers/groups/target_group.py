"""The worker groups of a target, whose ranks can load draft heads, and of models with adapters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic

from ray.util.placement_group import PlacementGroup

from cluster.workers.group_spec import GroupSpec
from cluster.workers.groups.ranks import Ranks
from cluster.workers.groups.roles import TARGET, OutputT, StepT
from cluster.workers.groups.worker_group import WorkerGroup
from cluster.workers.messages.frames import Frames
from cluster.workers.messages.load_messages import (
    ADAPTERS,
    HEADS,
    LOADING_S,
    FileT,
    LoadInbox,
    LoadMessages,
)
from specdec.types.adapters import AdapterFile
from specdec.types.drafters import HeadFile
from specdec.types.messages import StepInput, VerifyOutput


class AdapterGroup(WorkerGroup[StepT, OutputT], Generic[StepT, OutputT]):
    """The ranks of a target or a draft model; see WorkerGroup and AdapterRanks."""

    _loads: Mapping[object, LoadInbox] = MappingProxyType({})  # the last one of each kind of files

    def begin_adapter_load(self, adapter: AdapterFile) -> None:
        """Have every rank load an adapter after the steps that were sent before."""
        self._begin_load(ADAPTERS, adapter)

    def collect_adapter_load(self) -> str | None:
        """See AdapterRanks."""
        return self._collect_load(ADAPTERS)

    def unload_adapter(self, adapter_id: int) -> None:
        """Have every rank free an adapter after the steps that were sent before."""
        self._send_to_all(ADAPTERS.change(adapter_id))

    def _begin_load(self, kind: LoadMessages[FileT], file: FileT) -> None:
        self._loads = {**self._loads, kind: kind.inbox(file, self.num_ranks)}
        self._send_to_all(kind.load(file))

    def _collect_load(self, kind: LoadMessages[FileT]) -> str | None:
        assert kind in self._loads, "no load was begun"
        while self._read(0):
            pass
        return self._loads[kind].fault

    def _take_report(self, frames: Frames) -> bool:
        for kind in (HEADS, ADAPTERS):
            if kind.is_report(frames):
                self._put(frames, self._loads.get(kind))
                return True
        return super()._take_report(frames)

    @property
    def _extra_s(self) -> float:
        return super()._extra_s + sum(each.extra_s for each in self._loads.values())


class TargetGroup(AdapterGroup[StepInput, VerifyOutput]):
    """The ranks of a target; see WorkerGroup, HeadTarget and AdapterTarget."""

    _num_until_switched = 0  # outputs to come, up to that of the first step after a switch

    def __init__(
        self, spec: GroupSpec, placement: PlacementGroup, ranks: Ranks | None = None
    ) -> None:
        """See WorkerGroup. ranks: to use instead of new ones."""
        super().__init__(TARGET, spec, placement, ranks)

    def begin_head_load(self, head: HeadFile) -> None:
        """Have every rank load a head after the steps that were sent before."""
        self._begin_load(HEADS, head)

    def collect_head_load(self) -> str | None:
        """See HeadTarget."""
        return self._collect_load(HEADS)

    def switch_head(self, version: int) -> None:
        """Have every rank draft with a loaded version after the steps that were sent before."""
        if self._spec.device == "cuda" and not self._spec.limits.enforce_eager:
            self._num_until_switched = len(self._pending) + 1
        self._send_to_all(HEADS.change(version))

    def _decode(self, frames: Frames) -> VerifyOutput:
        self._num_until_switched = max(0, self._num_until_switched - 1)
        return super()._decode(frames)

    @property
    def _extra_s(self) -> float:
        return super()._extra_s + (LOADING_S if self._num_until_switched else 0.0)
