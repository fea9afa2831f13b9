"""Heads and adapters that the target's ranks load and free between two steps."""

from __future__ import annotations

from specdec.engine.loaded.adapters import Adapters
from specdec.engine.loaded.drafter_versions import DrafterVersions
from specdec.engine.requests.open_requests import OpenRequests
from specdec.engine.scheduling.async_scheduling import StepsInFlight
from specdec.sequences.sequence import SequenceStatus
from specdec.types.adapters import AdapterInfo
from specdec.types.errors import LostAdapterError
from specdec.types.messages import BASE_MODEL
from specdec.types.ranks import AdapterTarget, HeadTarget
from specdec.types.reports.stats import AdaptersInUse, Counts
from specdec.types.responses import EngineOutput


class RankUpdates:
    """Advances the versions of a draft head, and the adapters, as far as without waiting."""

    def __init__(
        self,
        drafters: DrafterVersions | None,
        adapters: Adapters | None,
        steps: StepsInFlight,
        requests: OpenRequests,
    ) -> None:
        """drafters, adapters: of the target; None where it has none that are replaced."""
        self._drafters = drafters
        self._adapters = adapters
        self._steps = steps
        self._requests = requests

    def restart(self) -> None:
        """Load again what new ranks lack."""
        if self._drafters is not None:
            self._drafters.restart()
        if self._adapters is not None:
            self._adapters.restart()

    def use_adapter(self, adapter_id: int, name: str) -> int:
        """Return the id that the adapter of a request has now. Raises UnknownModelError."""
        if adapter_id == BASE_MODEL:
            return adapter_id
        assert self._adapters is not None, "a request for an adapter without adapters"
        return self._adapters.use(adapter_id, name)

    def advance_drafters(self) -> None:
        """Load and activate the version of the head that is wanted. Raises TargetFailedError."""
        if self._drafters is None or self._drafters.is_settled:
            return
        target = self._steps.target
        assert isinstance(target, HeadTarget), "a head on a target that cannot replace it"
        self._drafters.advance(target)
        self._steps.head_version = self._drafters.active

    def advance_adapters(self) -> list[EngineOutput]:
        """Load and free adapters.

        Requests whose adapter cannot be loaded again after the target was lost end; returns their
        errors. Raises TargetFailedError.
        """
        if self._adapters is None or self._adapters.is_settled:
            return []
        target = self._steps.target
        assert isinstance(target, AdapterTarget), "adapters on a target that cannot load them"
        failed = set(self._adapters.advance(target, self._used_adapters()))
        sequences = self._requests.sequences
        lost = {
            seq.request.request_id: seq for seq in sequences if seq.request.adapter_id in failed
        }
        return [
            output
            for seq in lost.values()
            for output in self._requests.fail(seq, LostAdapterError(seq.request.model))
        ]

    def make_room_for_adapter(self) -> None:
        """Unload the least recently used idle adapter where no other one fits."""
        assert self._adapters is not None, "no adapters can be loaded"
        self._adapters.make_room(self._used_adapters())

    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters, oldest first; none where none can be loaded."""
        return () if self._adapters is None else self._adapters.snapshot(self._used_adapters())

    def adapters_in_use(self) -> AdaptersInUse:
        """Return the names of the adapters of running and of queued requests."""
        if self._adapters is None:
            return AdaptersInUse()
        return AdaptersInUse(
            self._names(SequenceStatus.RUNNING),
            self._names(SequenceStatus.WAITING),
            tuple(sorted(self._adapters.ids)),
        )

    def _names(self, status: SequenceStatus) -> tuple[str, ...]:
        assert self._adapters is not None
        used = {seq.request.adapter_id for seq in self._requests.sequences if seq.status is status}
        return tuple(sorted(name for name, each in self._adapters.ids.items() if each in used))

    @property
    def are_loading_adapters(self) -> bool:
        """Return whether sequences may wait for an adapter."""
        return self._adapters is not None and self._adapters.is_loading

    def add_to(self, counts: Counts) -> None:
        """Add the counters of heads and adapters to those of the engine."""
        if self._drafters is not None:
            self._drafters.add_to(counts)
        if self._adapters is not None:
            self._adapters.add_to(counts)

    def _used_adapters(self) -> list[int]:
        """Return the adapter id of each sequence that has not ended."""
        return [seq.request.adapter_id for seq in self._requests.sequences]
