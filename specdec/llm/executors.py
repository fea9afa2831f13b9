"""Choice of the executor that runs the models of an `LLM`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol

from specdec.config.llm import LLMConfig
from specdec.engine.core import Executor
from specdec.engine.memory_plan import MemoryPlan
from specdec.engine.model_resolution import ModelDirectories
from specdec.types.errors import SpecdecError

GROUP = "specdec.executors"
"""Entry points in it are called with config, directories and plan; they return an LLMExecutor."""


class LLMExecutor(Executor, Protocol):
    """Executor that loads its models when it is made, and raises what that raises."""

    def close(self) -> None:
        """End the models, after the engine's last call. From any thread, also at exit."""


def make_executor(
    name: str | None, config: LLMConfig, directories: ModelDirectories, plan: MemoryPlan
) -> LLMExecutor:
    """Load the models. name: of an entry point in GROUP; None loads them into this process.

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
    executor: LLMExecutor = next(iter(found)).load()(config, directories, plan)
    return executor
