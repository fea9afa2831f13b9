"""Measures the drafters of an alias: `python -m specdec.llm.drafter_trial`.

Standard input has the order of `specdec.llm.drafter_measurement` as JSON; standard output gets
the line LOADED once models and kernels are loaded, and then DrafterSpeeds as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from specdec.config.hardware import available_memory_bytes
from specdec.config.llm import LLMConfig
from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine_profiler import EngineProfiler
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.model_resolution import resolve_models, with_resolved_dtype
from specdec.llm.drafter_measurement import LOADED
from specdec.llm.drafter_speeds import Candidate, measure_rounds
from specdec.llm.local_executor import LocalExecutor
from specdec.models.drafters.card import SuiteAcceptance
from specdec.models.resolve import print_progress
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.factory import ProfiledModels, measure_costs
from specdec.text.tokenizer import Tokenizer
from specdec.types.ranks import Target

_LIMITS = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "kv_cache_memory_gib": 0.25,
}
"""A single stream, so that the profiler runs a few steps of each kind, and memory for all."""


def main() -> None:
    """Measure what standard input orders."""
    order: dict[str, Any] = json.load(sys.stdin)
    config = LLMConfig.from_mapping({**order["config"], **_LIMITS, "speculative_config": None})
    drafters = {name: SpeculativeConfig.of(**keys) for name, keys in order["drafters"].items()}
    acceptance = {
        name: [SuiteAcceptance(**each) for each in card]
        for name, card in order["acceptance"].items()
    }
    with loaded(config, drafters) as candidates:
        print(LOADED, flush=True)
        speeds = measure_rounds(candidates, acceptance, time.monotonic)
    json.dump(asdict(speeds), sys.stdout)


@contextmanager
def loaded(
    config: LLMConfig, drafters: Mapping[str, SpeculativeConfig]
) -> Iterator[list[Candidate]]:
    """Load the drafters, each with a target, within the context; all lookups are one candidate.

    Raises what loading raises.
    """
    lookups = [name for name, each in drafters.items() if each.drafter.place is DraftPlace.ENGINE]
    candidates = list[Candidate]()
    with ExitStack() as stack:

        def load(name: str) -> LoadedModels:
            models = LoadedModels(replace(config, speculative_config=drafters[name]))
            return stack.enter_context(closing(models))

        for name in (each for each in drafters if each not in lookups):
            candidates.append(Candidate([name], load(name).costs))
        if lookups:
            most = max(drafters[name].num_speculative_tokens for name in lookups)
            models = load(lookups[0])
            candidates.append(Candidate(lookups, partial(models.lookup_costs, most)))
        yield candidates


class LoadedModels:
    """The models of a configuration, and the measurement of their steps."""

    def __init__(self, config: LLMConfig) -> None:
        """Load the models. Raises what that raises."""
        directories = resolve_models(config, print_progress)
        models = directories.configs()
        config = with_resolved_dtype(config, models)
        plan = memory_plan(config, models, available_memory_bytes(), in_process=True)
        # As in a service, whose ranks are other processes.
        self._engine = replace(plan.engine, async_scheduling=config.async_scheduling)
        self._executor = LocalExecutor(config, directories, replace(plan, engine=self._engine))
        self._profiler = EngineProfiler(self._engine, models.target, Tokenizer(directories.target))

    def close(self) -> None:
        """Free the memory."""
        self._executor.close()

    def costs(self) -> CostTable:
        """Return the seconds of steps, with drafts made in this process."""
        speculation, profiler = self._executor.speculation, self._profiler
        measured = profiler.measure, profiler.text
        return self._executor.measure(lambda target: speculation.measure_costs(target, *measured))

    def lookup_costs(self, most: int) -> CostTable:
        """Return the seconds of steps with up to `most` draft tokens, which are looked up."""
        lookup = SpeculativeConfig.of("ngram", most)
        profiler = self._profiler

        def measure(target: Target) -> CostTable:
            models = ProfiledModels(target, profiler.measure, text=profiler.text)
            return measure_costs(lookup, self._engine, models)[None].whole

        return self._executor.measure(measure)


if __name__ == "__main__":
    main()
