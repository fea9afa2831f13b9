"""What runs the models of an `LLM`: this process, or what another package brings."""

from __future__ import annotations

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
    """Models that are loaded and warm. Raises what loading raises when it is made."""

    @property
    def target(self) -> Target:
        """The one in use, which `remake_target` replaces."""

    @property
    def counts(self) -> ModelCounts:
        """How often each model was made again."""

    def make_proposer(self) -> Proposer | None:
        """What drafts as it is configured; None where nothing does."""

    def make_policy(self, control: SpeculationControl, full_batch: int) -> SpeculationPolicy | None:
        """See `specdec.speculation.policy.factory`; to be called before there is a sequence."""

    def lose_target(self) -> None:
        """Called on the engine's thread before `remake_target`, which another one calls."""

    def remake_target(self) -> Target:
        """Replaces a lost target. Raises TargetFailedError."""

    def close(self) -> None:
        """Ends the models, after the engine's last call. From any thread, also at exit."""


def make_executor(
    name: str | None, config: LLMConfig, directories: ModelDirectories, plan: MemoryPlan
) -> Executor:
    """Loads the models. name: of an entry point in GROUP; None loads them into this process.

    Raises SpecdecError where no installed package has that name, and what loading raises.
    """
    if name is None:
        from specdec.llm.local_executor import LocalExecutor  # imports torch

        return LocalExecutor(config, directories, plan)
    found = entry_points(group=GROUP, name=name)
    if not found:
        raise SpecdecError(
            f"several ranks need the executor {name!r}, and no installed package has one: "
            f"install specdec with its cluster package, or leave tensor_parallel_size at 1"
        )
    executor: Executor = next(iter(found)).load()(config, directories, plan)
    return executor
