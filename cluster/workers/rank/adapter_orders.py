"""Orders for the adapters of one rank, of a target or a draft model, as messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.workers.messages.frames import Frames
from cluster.workers.messages.load_messages import ADAPTERS
from specdec.models.resolve import log_progress, resolve_adapter
from specdec.worker import ModelRunner


def execute_adapter_order(runner: ModelRunner, rank: int, frames: Frames) -> Iterator[Frames]:
    """Load an adapter and report it, or free one; no step is in flight."""
    adapters = runner.adapters
    assert adapters is not None, "the model was loaded without adapters"
    yield from ADAPTERS.execute(
        frames, rank, lambda adapter: adapters.load(adapter, _find), adapters.unload
    )


def _find(source: str, directory: Path) -> Path:
    """Return the directory of an adapter on this node: the Router's, or a download."""
    return directory if directory.is_dir() else resolve_adapter(source, log_progress)
