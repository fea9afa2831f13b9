"""Executors, which hold the models of an engine: in this process, or in workers of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol

from specdec.config.llm import LLMConfig
from specdec.engine.memory_plan import MemoryPlan
from specdec.engine.model_resolution import ModelDirectories
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import Proposer
from specdec.types.control import SpeculationControl
from specdec.types.counters import ModelCounts
from specdec.types.errors import SpecdecError
from specdec.types.worker import Target

GROUP = "specdec.executors"
"""Entry points in it are called with config, directories and plan, and return an Executor."""


class Executor(Protocol):
    """The target, and the draft model where one is configured."""

    def load(self) -> None:
        """Load the models and warm them up. Raises what loading raises."""

    @property
    def target(self) -> Target:
        """The target in use, which `remake_target` replaces."""

    @property
    def counts(self) -> ModelCounts:
        """How often each model was restarted, and the draft model's catch-up tokens."""

    def make_proposer(self) -> Proposer | None:
        """Return the configured proposer; None without speculation."""

    def make_policy(self, control: SpeculationControl, full_batch: int) -> SpeculationPolicy | None:
        """See `specdec.speculation.policy.factory`; called before there is a sequence, off the event loop."""

    def lose_target(self) -> None:
        """Stop using a lost target; on the engine's thread, before `remake_target`."""

    def remake_target(self) -> Target:
        """Restart a lost target. Blocking. Raises TargetFailedError."""

    def close(self) -> None:
        """End the models, after the engine's last call. From any thread, also at exit."""


def make_executor(
    name: str | None, config: LLMConfig, directories: ModelDirectories, plan: MemoryPlan
) -> Executor:
    """Make an executor and load its models.

    name: of an entry point in GROUP; None loads the models into this process. Raises SpecdecError
    where no installed package has that name, and what loading raises.
    """
    executor = _executor_type(name)(config, directories, plan)
    executor.load()
    return executor


def _executor_type(
    name: str | None,
) -> Callable[[LLMConfig, ModelDirectories, MemoryPlan], Executor]:
    if name is None:
        from specdec.llm.local_executor import LocalExecutor  # imports torch

        return LocalExecutor
    found = entry_points(group=GROUP, name=name)
    if not found:
        raise SpecdecError(
            f"several ranks need the executor {name!r}, and no installed package has one: "
            f"install specdec with its cluster package, or leave tensor_parallel_size at 1"
        )
    executor: Callable[..., Executor] = next(iter(found)).load()
    return executor
