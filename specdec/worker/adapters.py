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

logger = logging.getLogger(__name__)


class RankAdapters:
    """Loads and frees adapters between two steps."""

    def __init__(self, store: AdapterStore, max_rank: int) -> None:
        """max_rank: the largest rank of an adapter's modules."""
        self._store = store
        self._max_rank = max_rank

    @classmethod
    def enabled(cls, model: Decoder, limits: AdapterLimits | None) -> RankAdapters | None:
        """Let adapters be loaded into a model that has captured no graph; None without limits."""
        if limits is None:
            return None
        return cls(model.enable_adapters(limits), limits.max_rank)

    def load(self, file: AdapterFile, find: Callable[[], Path] | None = None) -> str:
        """Load an adapter; return why it cannot be loaded, empty if it is.

        find: returns its directory on this node; None for that of the file.
        """
        try:
            directory = find() if find else Path(file.directory)
            files = AdapterFiles.read(directory, self._max_rank)
            load_adapter(self._store, file.adapter_id, files)
        except Exception as error:  # of any type: the files may hold anything
            logger.warning("adapter %s cannot be loaded", file.name, exc_info=error)
            return reason_of(error)
        return ""

    def unload(self, adapter_id: int) -> None:
        """Free an adapter that no later step names."""
        self._store.drop(adapter_id)
