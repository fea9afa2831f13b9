"""Where a node finds a model that was looked up on another one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from specdec.models.resolve import resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model by the name that it was asked for, and where the Router's node has it."""

    name: str
    directory: Path

    def here(self) -> Path:
        """Where this node has it, fetched if need be. Raises ModelNotFoundError."""
        if self.directory.is_dir():
            return self.directory
        return resolve(self.name, progress=log_progress)


def log_progress(line: str) -> None:
    """For whoever fetches a model with nobody watching."""
    logger.info("%s", line)
