"""Adapters in the memory of one rank of a target or a draft model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from specdec.config.engine import AdapterLimits
from specdec.models.loading import Decoder
from specdec.models.lora.peft import AdapterFiles
from specdec.models.lora.updates import AdapterStore, load_adapter
from specdec.types.adapters import AdapterFile
from specdec.types.errors import reason_of
from specdec.worker.head.adapters import HeadAdapters

logger = logging.getLogger(__name__)


FindAdapter = Callable[[str, Path], Path]
"""Returns the directory on this node of a source, which has the other one on the engine's."""


def _as_ordered(source: str, directory: Path) -> Path:
    del source
    return directory


class RankAdapters:
    """Loads and frees adapters between two steps."""

    def __init__(
        self, store: AdapterStore, max_rank: int, head: HeadAdapters | None = None
    ) -> None:
        """max_rank: the largest rank of an adapter's modules. head: those of a draft head."""
        self._store = store
        self._max_rank = max_rank
        self._head = head

    @classmethod
    def enabled(
        cls, model: Decoder, limits: AdapterLimits | None, head: HeadAdapters | None = None
    ) -> RankAdapters | None:
        """Let adapters be loaded into a model that has captured no graph; None without limits."""
        if limits is None:
            return None
        return cls(model.enable_adapters(limits), limits.max_rank, head)

    def load(self, file: AdapterFile, find: FindAdapter = _as_ordered) -> str:
        """Load an adapter; return why it cannot be loaded, empty if it is.

        find: returns the directory of a source on this node.
        """
        adapter_id = file.adapter_id
        try:
            load_adapter(self._store, adapter_id, self._read(file.source, file.directory, find))
            draft = self._read(file.draft_source, file.draft_directory, find)
            if self._head is not None:
                self._head.load(adapter_id, draft, needs_version=not file.is_reloaded)
            else:
                assert draft is None, "no draft head here takes adapters"
        except Exception as error:  # of any type: the files may hold anything
            logger.warning("adapter %s cannot be loaded", file.name, exc_info=error)
            self._store.drop(adapter_id)
            return reason_of(error)
        return ""

    def _read(self, source: str, directory: str, find: FindAdapter) -> AdapterFiles | None:
        """Read an adapter; None without a source."""
        if not source:
            return None
        return AdapterFiles.read(find(source, Path(directory)), self._max_rank)

    def unload(self, adapter_id: int) -> None:
        """Free an adapter that no later step names."""
        self._store.drop(adapter_id)
        if self._head is not None:
            self._head.drop(adapter_id)
