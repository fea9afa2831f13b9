"""Routers that serve with an engine of a test, in place of `ReplicaRouter.start`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.replica.replica_router import ReplicaRouter
from specdec.engine.engine import Engine
from specdec.engine.engine_thread import EngineThread
from specdec.engine.lifecycle import LoadedEngine, RunningEngine
from specdec.types.reports.stats import Counts

_NO_MODELS: Any = SimpleNamespace(counts=Counts())


def serve(router: ReplicaRouter, engine: Engine) -> EngineThread:
    """Run an engine for the running event loop; return its thread, which the test closes."""
    thread = EngineThread(engine)
    serve_on(router, thread, engine)
    return thread


def serve_on(router: ReplicaRouter, thread: Any, engine: Any = None) -> None:
    """Serve with what stands for the engine's thread."""
    loaded = LoadedEngine(engine, _NO_MODELS, router.metrics, router.setup.settings)
    router.serve(RunningEngine(loaded, thread))
