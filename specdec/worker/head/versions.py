"""Versions of a draft head in the memory of one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from specdec.models.heads.networks.base import DraftHead
from specdec.types.drafters import CONFIGURED_VERSION, HeadFile
from specdec.types.errors import reason_of
from specdec.worker.head.runner import HeadRunner

logger = logging.getLogger(__name__)

LoadHead = Callable[[Path], DraftHead]
"""Loads this rank's shard of a head that can take the place of the configured one."""


class HeadVersions:
    """The active head of a rank, the one before it, and one that was loaded for a switch."""

    def __init__(self, runner: HeadRunner, load: LoadHead) -> None:
        """runner: drafts with the configured version."""
        self._runner = runner
        self._load = load
        self._heads = {CONFIGURED_VERSION: runner.head}
        self._active = self._before = CONFIGURED_VERSION

    def load(self, file: HeadFile, find: Callable[[], Path] | None = None) -> str:
        """Load a version unless it is loaded; return why it cannot be, empty if it is.

        find: returns its directory on this node; None for that of the file. Another version that
        was loaded and never used is dropped first, so at most MAX_LOADED_VERSIONS are in memory.
        """
        if file.version in self._heads:
            return ""
        self._heads = self._in_use
        try:
            head = self._load(find() if find else Path(file.directory))
        except Exception as error:  # of any type: the files may hold anything
            logger.warning("version %d of the head cannot be loaded", file.version, exc_info=error)
            return reason_of(error)
        self._heads[file.version] = head
        return ""

    def switch(self, version: int) -> None:
        """Draft with a loaded version; keep the one before it for the way back."""
        assert version in self._heads, f"version {version} of the head is not loaded"
        self._before, self._active = self._active, version
        self._heads = self._in_use
        self._runner.replace_head(self._heads[version])

    @property
    def _in_use(self) -> dict[int, DraftHead]:
        return {each: self._heads[each] for each in (self._before, self._active)}
