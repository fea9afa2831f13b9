"""The worker groups of a target, whose ranks can load draft heads, and of models with adapters."""

from __future__ import annotations

from typing import Generic

from ray.util.placement_group import PlacementGroup

from cluster.workers.group_spec import GroupSpec
from cluster.workers.groups.ranks import Ranks
from cluster.workers.groups.roles import TARGET, OutputT, StepT
from cluster.workers.groups.worker_group import WorkerGroup
from cluster.workers.messages import adapter_messages
from cluster.workers.messages.frames import Frames
from cluster.workers.messages.head_messages import (
    LOADING_S,
    LoadInbox,
    is_load_report,
    load_message,
    switch_message,
)
from specdec.types.adapters import AdapterFile
from specdec.types.drafters import HeadFile
from specdec.types.messages import StepInput, VerifyOutput


class AdapterGroup(WorkerGroup[StepT, OutputT], Generic[StepT, OutputT]):
    """The ranks of a target or a draft model; see WorkerGroup and AdapterRanks."""

    _adapter_inbox: LoadInbox | None = None

    def begin_adapter_load(self, adapter: AdapterFile) -> None:
        """Have every rank load an adapter after the steps that were sent before."""
        self._adapter_inbox = LoadInbox(adapter.adapter_id, self.num_ranks)
        self._send_to_all(adapter_messages.load_message(adapter))

    def collect_adapter_load(self) -> str | None:
        """See AdapterRanks."""
        assert self._adapter_inbox is not None, "no load was begun"
        while self._read(0):
            pass
        return self._adapter_inbox.fault

    def unload_adapter(self, adapter_id: int) -> None:
        """Have every rank free an adapter after the steps that were sent before."""
        self._send_to_all(adapter_messages.unload_message(adapter_id))

    def _take_report(self, frames: Frames) -> bool:
        if not adapter_messages.is_adapter_report(frames):
            return super()._take_report(frames)
        self._put(frames, self._adapter_inbox)
        return True

    @property
    def _extra_s(self) -> float:
        return super()._extra_s + _loading_s(self._adapter_inbox)


class TargetGroup(AdapterGroup[StepInput, VerifyOutput]):
    """The ranks of a target; see WorkerGroup, HeadTarget and AdapterTarget."""

    _load_inbox: LoadInbox | None = None

    def __init__(
        self, spec: GroupSpec, placement: PlacementGroup, ranks: Ranks | None = None
    ) -> None:
        """See WorkerGroup. ranks: to use instead of new ones."""
        super().__init__(TARGET, spec, placement, ranks)

    def begin_head_load(self, head: HeadFile) -> None:
        """Have every rank load a head after the steps that were sent before."""
        self._load_inbox = LoadInbox(head.version, self.num_ranks)
        self._send_to_all(load_message(head))

    def collect_head_load(self) -> str | None:
        """See HeadTarget."""
        assert self._load_inbox is not None, "no load was begun"
        while self._read(0):
            pass
        return self._load_inbox.fault

    def switch_head(self, version: int) -> None:
        """Have every rank draft with a loaded version after the steps that were sent before."""
        self._send_to_all(switch_message(version))

    def _take_report(self, frames: Frames) -> bool:
        if not is_load_report(frames):
            return super()._take_report(frames)
        self._put(frames, self._load_inbox)
        return True

    @property
    def _extra_s(self) -> float:
        return super()._extra_s + _loading_s(self._load_inbox)


def _loading_s(inbox: LoadInbox | None) -> float:
    """Return the addition to the time limit of a step while ranks load."""
    return LOADING_S if inbox is not None and not inbox.is_complete else 0.0
