"""The location of a model on a node, when another node has resolved its name."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from specdec.models.resolve import resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model by the configured name, and its directory on the Router's node."""

    name: str
    directory: Path

    def here(self) -> Path:
        """Return its directory on this node; download it if needed. Raises ModelNotFoundError."""
        if self.directory.is_dir():
            return self.directory
        return resolve(self.name, progress=log_progress)


def log_progress(line: str) -> None:
    """Log the progress of a download that has no terminal."""
    logger.info("%s", line)
