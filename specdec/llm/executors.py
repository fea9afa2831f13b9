"""Executors, which hold the models of an engine: in this process, or in workers of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from specdec.config.llm import LLMConfig
from specdec.engine.core import Executor
from specdec.engine.memory_plan import MemoryPlan
from specdec.engine.model_resolution import ModelDirectories
from specdec.types.errors import SpecdecError

GROUP = "specdec.executors"
"""Entry points in it are called with config, directories and plan, and return an Executor."""


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
