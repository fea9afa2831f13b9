"""The LoRA adapters of a draft model: which of them its worker has, and which it is to load.

An adapter of the target may have a counterpart for the draft model, under the same id. Sequences
whose adapter has none are drafted for by the base model.
"""

from __future__ import annotations

import logging
from typing import Protocol

from specdec.types.adapters import AdapterFile
from specdec.types.messages import BASE_MODEL
from specdec.types.ranks import AdapterRanks, DraftWorker

logger = logging.getLogger(__name__)


class AdapterDrafter(Protocol):
    """A draft model that can load adapters. Its loss is no fault: it then drafts without them."""

    def load_adapter(self, adapter: AdapterFile) -> None:
        """Order an adapter; it has no effect for one that was ordered. Does not wait."""

    def adapter_fault(self, adapter_id: int) -> str | None:
        """Return why an ordered adapter could not be loaded; None while the ranks load it.

        Empty if they have it, and where the draft model restarts.
        """

    def unload_adapter(self, adapter_id: int) -> None:
        """Free an adapter that no open request names; an unknown id is no error."""


class DraftAdapters:
    """The adapters of one draft worker, which loads them one after the other.

    They are loaded between steps, as the calls of the engine's thread come. A step after a load
    would wait for it.
    """

    def __init__(self, worker: DraftWorker) -> None:
        """worker: must be able to load adapters before one is ordered."""
        self._worker = worker
        self._ordered: dict[int, AdapterFile] = {}  # by id, those that are not loaded yet
        self._loading: AdapterFile | None = None  # on the ranks at this moment
        self._loaded: set[int] = set()
        self._faults: dict[int, str] = {}  # of orders that failed

    def load(self, adapter: AdapterFile) -> None:
        """See AdapterDrafter."""
        adapter_id = adapter.adapter_id
        if adapter_id not in self._loaded and adapter_id not in self._faults:
            self._ordered.setdefault(adapter_id, adapter)
            self.advance()

    def fault_of(self, adapter_id: int) -> str | None:
        """See AdapterDrafter; empty for an adapter that was not ordered."""
        self.advance()
        return None if adapter_id in self._ordered else self._faults.get(adapter_id, "")

    def unload(self, adapter_id: int) -> None:
        """See AdapterDrafter; one that is loading is freed when the ranks have it."""
        self._ordered.pop(adapter_id, None)
        self._faults.pop(adapter_id, None)
        if adapter_id in self._loaded:
            self._loaded.discard(adapter_id)
            self._ranks.unload_adapter(adapter_id)

    def id_for(self, adapter_id: int) -> int:
        """Return the adapter with which to draft for a sequence with this one."""
        return adapter_id if adapter_id in self._loaded else BASE_MODEL

    @property
    def is_loading(self) -> bool:
        """Return whether the ranks load an adapter at this moment."""
        self.advance()
        return self._loading is not None

    def advance(self) -> None:
        """Take note of what the ranks have loaded, and order what is next. Does not wait."""
        while self._loading is not None or self._ordered:
            if self._loading is None:
                self._loading = next(iter(self._ordered.values()))
                self._ranks.begin_adapter_load(self._loading)
            fault = self._ranks.collect_adapter_load()
            if fault is None:
                return
            adapter, self._loading = self._loading, None
            self._record(adapter, fault)

    def _record(self, adapter: AdapterFile, fault: str) -> None:
        """Record an answer of the ranks; free an adapter that only some of them have."""
        adapter_id = adapter.adapter_id
        is_wanted = self._ordered.pop(adapter_id, None) is not None
        if fault or not is_wanted:
            self._ranks.unload_adapter(adapter_id)
        else:
            self._loaded.add(adapter_id)
            logger.info("the draft model has adapter %s from %s", adapter.name, adapter.source)
        if fault and is_wanted:
            self._faults[adapter_id] = fault
            logger.warning("the draft model cannot load adapter %s: %s", adapter.name, fault)

    @property
    def _ranks(self) -> AdapterRanks:
        assert isinstance(self._worker, AdapterRanks), "a draft worker without adapters"
        return self._worker
