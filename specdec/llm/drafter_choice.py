"""Chooses the fastest drafter of an alias on this machine.

How many draft tokens are accepted depends on model and text, and is in each drafter's card. What a
step costs depends on the machine, and is measured once, in a separate process
(`specdec.llm.drafter_trial`). Both together give the expected tokens per second of one stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from statistics import harmonic_mean
from typing import Any

from specdec.config.hardware import (
    available_cpus,
    default_cache_dir,
    processor_name,
    require_gpu,
)
from specdec.config.llm import Config, LLMConfig
from specdec.config.model_aliases import ALIASES, ShippedDrafter
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.drafters.card import (
    CARD,
    SuiteAcceptance,
    drafter_directory,
    read_acceptance,
)
from specdec.models.hub import Progress
from specdec.models.resolve import resolve
from specdec.models.weights.fingerprint import weights_fingerprint
from specdec.speculation.policy.cost_model import CostTable
from specdec.types.errors import SpecdecError, UnsupportedModelError

_MARGIN = 1.03
"""A drafter replaces one that is listed before it if it is this much faster: times are noisy."""
_PROCESS_MARGIN = 1.4
"""Margin of a draft model in another process, as in a service: the trial has neither the messages
between them nor the cores that they share. On 2 cores a speed-up of 1.77 became 1.24, and one of
1.42 by a head 1.34 (int8, benchmarks/default_drafter.py)."""
_TIMEOUT_S = 60.0
"""A loaded machine needs a multiple of the few seconds that an idle one needs."""
_MEASURED_SETTINGS = ("model", "dtype", "quantization", "device", "kernels")

MeasureSteps = Callable[[LLMConfig, Sequence[ShippedDrafter]], Mapping[str, CostTable]]
"""Returns the seconds of one sequence's steps with each drafter, by its name, where target and
drafter run one after the other. Raises TrialError."""


class TrialError(SpecdecError):
    """The steps of the drafters could not be measured."""


@dataclass(frozen=True)
class DrafterChoice:
    """The drafters' expected speed with one stream.

    name: the fastest. tokens_per_s: without drafts. speedups: over that, by name.
    """

    name: str
    tokens_per_s: float
    speedups: Mapping[str, float]

    @classmethod
    def of(
        cls,
        acceptance: Mapping[str, Sequence[SuiteAcceptance]],
        costs: Mapping[str, CostTable],
        draft_models: Collection[str] = (),
    ) -> DrafterChoice:
        """Choose among the drafters in the order of `acceptance`, by the cells that all have.

        draft_models: the names of those that will run in another process.
        """
        cells = [{each.cell for each in suites} for suites in acceptance.values()]
        common = set.intersection(*cells)
        speedups = {
            name: harmonic_mean(
                [best_speedup(costs[name], each) for each in suites if each.cell in common]
            )
            for name, suites in acceptance.items()
        }
        best, *others = speedups
        for name in others:
            margin = _PROCESS_MARGIN if name in draft_models else _MARGIN
            if speedups[name] > margin * speedups[best]:
                best = name
        plain_s = min(table.step_s(1, 0) for table in costs.values())
        return cls(best, 1 / plain_s, speedups)

    def describe(self) -> str:
        """Return the choice and its reason for the log."""
        by_speed = sorted(self.speedups, key=lambda name: -self.speedups[name])
        speeds = [f"{name} {self.speedups[name] * self.tokens_per_s:.0f}" for name in by_speed]
        line = f"drafter {self.name}; expected tokens/s of one stream: {', '.join(speeds)}"
        line += f", no drafts {self.tokens_per_s:.0f}"
        if self.name != by_speed[0]:
            line += f" ({by_speed[0]} is not ahead by the required margin)"
        return line


def best_speedup(costs: CostTable, suite: SuiteAcceptance) -> float:
    """Return the speed with the best draft length, relative to none; at least 1.

    Relative to the same table, as other load on the machine may have changed between two tables.
    """
    plain_s = costs.step_s(1, 0)

    def speedup(count: int) -> float:
        share = suite.draft_share if count else 0.0
        step_s = share * costs.step_s(1, count) + (1 - share) * plain_s
        return suite.expected_tokens(count) * plain_s / step_s

    return max(map(speedup, range(1 + len(suite.accepted_per_step))))


def with_fastest_drafter(
    config: Config,
    progress: Progress,
    measure: MeasureSteps | None = None,
    *,
    in_process: bool = False,
) -> Config:
    """Return the configuration with the fastest drafter of its alias, if it leaves that open.

    The configuration keeps its default, the first drafter, where the measurement fails, and where
    all are lookups: their steps cost the same. Raises ModelNotFoundError.

    measure: of steps; None for that of this machine, whose result is stored for each precision.
    in_process: whether a draft model will run in the process of the target.
    """
    speculation = config.speculative_config
    if speculation is None or not speculation.is_auto:
        return config
    source = ALIASES[config.model]
    if measure is None and not any(each.has_weights for each in source.drafters):
        return config
    directory = resolve(config.model, progress=progress)
    if weights_fingerprint(directory) != source.weights_sha256:
        progress(
            f"the weights in {directory} are not those that the drafters of {config.model} were "
            "made for: drafting with ngram"
        )
        return replace(config, speculative_config=SpeculativeConfig.of())
    try:
        measure = measure or measure_in_process
        choice = _choice(config, source.drafters, progress, measure, in_process=in_process)
    except TrialError as error:
        progress(f"{error}; drafting with {source.drafters[0].name}, the default")
        return config
    progress(choice.describe())
    chosen = next(each for each in source.drafters if each.name == choice.name)
    speculation = SpeculativeConfig.of(**chosen.keys(config.device))
    return replace(config, speculative_config=speculation)


def _choice(
    config: LLMConfig,
    drafters: Sequence[ShippedDrafter],
    progress: Progress,
    measure: MeasureSteps,
    *,
    in_process: bool,
) -> DrafterChoice:
    """Return the stored choice of this machine, or measure and store it."""
    key = _machine_key(config, drafters, in_process=in_process)
    path = default_cache_dir() / "drafters" / f"{config.model}-{key}.json"
    with suppress(OSError, ValueError, TypeError):
        return DrafterChoice(**json.loads(path.read_bytes()))
    progress(f"measuring the drafters of {config.model} (once for this machine and precision)")
    try:
        acceptance = {each.name: read_acceptance(drafter_directory(each.name)) for each in drafters}
    except UnsupportedModelError as error:
        raise TrialError(str(error)) from error
    elsewhere = (
        [] if in_process else [each.name for each in drafters if each.method == "draft_model"]
    )
    choice = DrafterChoice.of(acceptance, measure(config, drafters), elsewhere)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(choice)))
        temporary.replace(path)
    except OSError as error:
        progress(f"the choice is not stored, and will be measured again: {error}")
    return choice


def _machine_key(config: LLMConfig, drafters: Sequence[ShippedDrafter], *, in_process: bool) -> str:
    """Return a hash of what the choice depends on."""
    paths = (drafter_directory(each.name) / CARD for each in drafters)
    cards = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    facts = [
        version("specdec"),
        processor_name(),
        available_cpus(),
        in_process,
        *(getattr(config, name) for name in _MEASURED_SETTINGS),
        *zip(map(repr, drafters), cards, strict=True),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def measure_in_process(
    config: LLMConfig, drafters: Sequence[ShippedDrafter]
) -> dict[str, CostTable]:
    """Measure in a separate process, whose memory and threads end with it. See MeasureSteps.

    Raises also InvalidValueError for device cuda without a GPU.
    """
    if config.device == "cuda":
        require_gpu()
    settings = {name: getattr(config, name) for name in _MEASURED_SETTINGS}
    keys = {each.name: each.keys(config.device) for each in drafters}
    order = json.dumps({"config": settings, "drafters": keys})
    # Modules are found as here, and not in the working directory.
    command = [sys.executable, "-P", "-m", "specdec.llm.drafter_trial"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        ended = subprocess.run(
            command,
            input=order,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TrialError(f"the drafters were not measured within {_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise TrialError(f"the drafters could not be measured: {error}") from error
    if ended.returncode != 0:
        reason = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise TrialError(f"the drafters could not be measured: {reason}")
    try:
        # Libraries may write to standard output too; the last line is the result.
        result = json.loads(ended.stdout.strip().rpartition("\n")[2])
        return {name: _table(each) for name, each in result.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrialError(f"the drafters could not be measured: {error!r}") from error


def _table(fields: Mapping[str, Any]) -> CostTable:
    """Return a table from the JSON of its fields."""
    sizes, counts = tuple(fields["batch_sizes"]), tuple(fields["draft_tokens"])
    return CostTable(sizes, counts, tuple(map(tuple, fields["seconds"])))
