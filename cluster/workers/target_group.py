"""The worker group of a target, whose ranks can load draft heads and adapters."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup

from cluster.workers import adapter_messages
from cluster.workers.frames import Frames
from cluster.workers.group_spec import GroupSpec
from cluster.workers.head_messages import (
    LOADING_S,
    LoadInbox,
    is_load_report,
    load_message,
    switch_message,
)
from cluster.workers.ranks import Ranks
from cluster.workers.worker_group import TARGET, WorkerGroup
from specdec.types.adapters import AdapterFile
from specdec.types.drafters import HeadFile
from specdec.types.messages import StepInput, VerifyOutput


class TargetGroup(WorkerGroup[StepInput, VerifyOutput]):
    """The ranks of a target; see WorkerGroup, HeadTarget and AdapterTarget."""

    def __init__(
        self, spec: GroupSpec, placement: PlacementGroup, ranks: Ranks | None = None
    ) -> None:
        """See WorkerGroup. ranks: to use instead of new ones."""
        self._load_inbox: LoadInbox | None = None
        self._adapter_inbox: LoadInbox | None = None
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

    def begin_adapter_load(self, adapter: AdapterFile) -> None:
        """Have every rank load an adapter after the steps that were sent before."""
        self._adapter_inbox = LoadInbox(adapter.adapter_id, self.num_ranks)
        self._send_to_all(adapter_messages.load_message(adapter))

    def collect_adapter_load(self) -> str | None:
        """See AdapterTarget."""
        assert self._adapter_inbox is not None, "no load was begun"
        while self._read(0):
            pass
        return self._adapter_inbox.fault

    def unload_adapter(self, adapter_id: int) -> None:
        """Have every rank free an adapter after the steps that were sent before."""
        self._send_to_all(adapter_messages.unload_message(adapter_id))

    def _take_report(self, frames: Frames) -> bool:
        if is_load_report(frames):
            inbox = self._load_inbox
        elif adapter_messages.is_adapter_report(frames):
            inbox = self._adapter_inbox
        else:
            return super()._take_report(frames)
        if inbox is not None:
            inbox.take(frames)
        return True

    @property
    def _extra_s(self) -> float:
        inboxes = (self._load_inbox, self._adapter_inbox)
        num_loading = sum(each is not None and not each.is_complete for each in inboxes)
        return super()._extra_s + LOADING_S * num_loading
