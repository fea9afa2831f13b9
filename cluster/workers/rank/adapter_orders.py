"""Orders for the adapters of one rank, of a target or a draft model, as messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.workers.messages.adapter_messages import load_report, order_in
from cluster.workers.messages.frames import Frames
from specdec.models.resolve import log_progress, resolve_adapter
from specdec.worker import ModelRunner


def execute_adapter_order(runner: ModelRunner, rank: int, frames: Frames) -> Iterator[Frames]:
    """Load an adapter and report it, or free one; no step is in flight."""
    assert runner.adapters is not None, "the model was loaded without adapters"
    order = order_in(frames)
    if isinstance(order, int):
        runner.adapters.unload(order)
        return
    fault = runner.adapters.load(order, _find)
    yield load_report(rank, order.adapter_id, fault)


def _find(source: str, directory: Path) -> Path:
    """Return the directory of an adapter on this node: the Router's, or a download."""
    return directory if directory.is_dir() else resolve_adapter(source, log_progress)
