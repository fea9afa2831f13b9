"""Measures the steps of an alias's drafters: `python -m specdec.llm.drafter_trial`.

Standard input has the order of `specdec.llm.drafter_choice` as JSON; standard output gets a
CostTable for each drafter, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from specdec.config.hardware import available_memory_bytes
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine_profiler import EngineProfiler
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.model_resolution import resolve_models, with_resolved_dtype
from specdec.llm.local_executor import LocalExecutor
from specdec.models.resolve import print_progress
from specdec.speculation.policy.cost_model import CostTable
from specdec.text.tokenizer import Tokenizer

_LIMITS = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "max_model_len": 512}
"""A single stream, so that the profiler runs a few steps of each kind."""


def main() -> None:
    """Measure what standard input orders."""
    order: dict[str, Any] = json.load(sys.stdin)
    config = LLMConfig.from_mapping({**order["config"], **_LIMITS, "speculative_config": None})
    drafters = {name: SpeculativeConfig.of(**keys) for name, keys in order["drafters"].items()}
    tables = measure(config, drafters)
    json.dump({name: asdict(table) for name, table in tables.items()}, sys.stdout)


def measure(config: LLMConfig, drafters: Mapping[str, SpeculativeConfig]) -> dict[str, CostTable]:
    """Return the seconds of steps with each drafter, by name; lookups are measured once.

    Raises what loading raises.
    """
    lookups = {name: each for name, each in drafters.items() if not _has_model(each)}
    tables: dict[str, CostTable] = {}
    if lookups:
        longest = max(lookups.values(), key=lambda each: each.num_speculative_tokens)
        tables = dict.fromkeys(lookups, step_costs(replace(config, speculative_config=longest)))
    for name, each in drafters.items():
        if name not in tables:
            tables[name] = step_costs(replace(config, speculative_config=each))
    return tables


def step_costs(config: LLMConfig) -> CostTable:
    """Load the models of a configuration, and return the seconds of their steps."""
    directories = resolve_models(config, print_progress)
    models = directories.configs()
    config = with_resolved_dtype(config, models)
    plan = memory_plan(config, models, available_memory_bytes(), in_process=True)
    # As in a service, whose ranks are other processes.
    engine = replace(plan.engine, async_scheduling=config.async_scheduling)
    executor = LocalExecutor(config, directories, replace(plan, engine=engine))
    try:
        profiler = EngineProfiler(engine, models.target, Tokenizer(directories.target))
        drafting, measured = executor.drafting, (profiler.measure, profiler.text)
        return executor.measure(lambda target: drafting.measure_costs(target, *measured))
    finally:
        executor.close()  # the next drafter needs the memory


def _has_model(speculation: SpeculativeConfig) -> bool:
    return speculation.head is not None or speculation.draft_model is not None


if __name__ == "__main__":
    main()
