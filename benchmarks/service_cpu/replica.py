"""The parts of the service that a benchmark replaces: the rank of the target, and its choice.

`install` runs in the process that deploys the service. The Router's replica is then a
`ClockedReplica`, which starts `ClockedWorker` in place of `TargetWorker` and reports its threads.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest.mock import patch

from ray.util.placement_group import PlacementGroup

from benchmarks.service_cpu.cpu import EVENT_LOOP, THREADS_FILE
from benchmarks.service_cpu.device import LINE_FILE, ClockedRunner
from cluster.config.serve_config import ServeConfig
from cluster.serve import application
from cluster.serve.deployment import RouterReplica
from cluster.workers.group_spec import Peers
from cluster.workers.groups import target_group
from cluster.workers.groups.roles import TARGET
from cluster.workers.rank.actor import TargetWorker
from cluster.workers.rank.heap import freeze_heap
from cluster.workers.rank.target_steps import TargetSteps
from cluster.workers.rank.worker import ModelWorker
from specdec.engine import lifecycle
from specdec.engine.engine_thread import EngineThread
from specdec.worker import TargetModelRunner


class ClockedWorker(TargetWorker):
    """A rank whose device computes nothing; everything else is that of the service."""

    def _load(self, peers: Peers) -> ModelWorker:
        runner = cast("TargetModelRunner", ClockedRunner(self._spec.model.directory))
        steps = TargetSteps(runner, self._rank)
        freeze_heap()
        return ModelWorker(runner, steps, self._rank, steps.finish)


class StartLine(EngineThread):
    """Engine's thread that steps while all streams of a load have a request.

    Otherwise a target that takes no time ends streams while others are still accepted. Requests of
    front ends do not wait.
    """

    directory: ClassVar[Path]
    _line, _num_added = (0, 0), 0  # streams, and requests of this load and those before

    def _add(self, *arguments: Any, **options: Any) -> Any:
        self._num_added += 1
        if self._num_added > self._line[1]:
            self._line = json.loads((self.directory / LINE_FILE).read_text())
        return super()._add(*arguments, **options)

    @property
    def _can_step(self) -> bool:
        streams, num_requests = self._line
        is_full = self.num_streams >= streams or self._num_added >= num_requests
        return is_full and super()._can_step


class ClockedReplica(RouterReplica):
    """A replica whose target is a clocked device."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Mapping[str, Any],
        control_plane: Any,
        located: Any,
        draft_pool: Any,
    ) -> None:
        self._directory = StartLine.directory = Path(ServeConfig.from_mapping(config).model)
        clocked = replace(TARGET, actor=ClockedWorker)
        patch.object(target_group, "TARGET", clocked).start()  # this process serves nothing else
        patch.object(lifecycle, "EngineThread", StartLine).start()
        await super().__init__(config, control_plane, located, draft_pool)

    async def _start(self, placement: PlacementGroup | None, located: Any) -> None:
        await super()._start(placement, located)
        names = {each.name: each.native_id for each in threading.enumerate()}
        threads = {"pid": os.getpid(), "threads": {**names, EVENT_LOOP: threading.get_native_id()}}
        (self._directory / THREADS_FILE).write_text(json.dumps(threads))


def install() -> None:
    """Have this process deploy the service with a clocked device."""
    patch.object(application, "RouterReplica", ClockedReplica).start()
