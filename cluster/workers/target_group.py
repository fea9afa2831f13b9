"""The worker group of a target, whose ranks can draft with a head that is replaced."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup

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
from specdec.types.drafters import HeadFile
from specdec.types.messages import StepInput, VerifyOutput


class TargetGroup(WorkerGroup[StepInput, VerifyOutput]):
    """The ranks of a target; see WorkerGroup and HeadTarget."""

    def __init__(
        self, spec: GroupSpec, placement: PlacementGroup, ranks: Ranks | None = None
    ) -> None:
        """See WorkerGroup. ranks: to use instead of new ones."""
        self._load_inbox: LoadInbox | None = None
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
        if self._load_inbox is not None:
            self._load_inbox.take(frames)
        return True

    @property
    def _extra_s(self) -> float:
        is_loading = self._load_inbox is not None and not self._load_inbox.is_complete
        return super()._extra_s + LOADING_S * is_loading
