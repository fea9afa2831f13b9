"""Breakdown of the time of a target's step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from specdec.worker import TargetModelRunner


class TimedRunner:
    """Context manager that accumulates the time in some methods of a runner."""

    _METHODS = ("execute", "_verify", "model.forward", "model.compute_logits_and_argmax")

    def __init__(self, runner: TargetModelRunner) -> None:
        self._runner = runner
        self.seconds = dict.fromkeys(self._METHODS, 0.0)

    def __enter__(self) -> TimedRunner:
        for path in self._METHODS:
            owner, name = self._owner_of(path)
            setattr(owner, name, self._timed(path, getattr(owner, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for path in self._METHODS:
            owner, name = self._owner_of(path)
            delattr(owner, name)  # restores the method of the class

    def _owner_of(self, path: str) -> tuple[object, str]:
        holder, _, name = path.rpartition(".")
        return (self._runner.model if holder else self._runner), name

    def _timed(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            started_at = time.perf_counter()
            result = method(*arguments, **keywords)
            self.seconds[path] += time.perf_counter() - started_at
            return result

        return timed
