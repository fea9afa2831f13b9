"""Chooses the fastest drafter of an alias on this machine, measured once and stored."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from specdec.config.hardware import (
    LoadOfOthers,
    available_cpus,
    default_cache_dir,
    gpu_name,
    processor_name,
)
from specdec.config.llm import Config, LLMConfig
from specdec.config.model_aliases import ALIASES, PackagedModel, ShippedDrafter
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.llm.drafter_measurement import (
    MEASURED_SETTINGS,
    MeasureSpeeds,
    TrialError,
    measure_in_process,
)
from specdec.llm.drafter_speeds import Acceptance, DrafterSpeeds, comparable, speeds_from
from specdec.models.drafters.card import CARD, drafter_directory, read_acceptance
from specdec.models.hub import Progress
from specdec.models.resolve import resolve
from specdec.models.weights.fingerprint import weights_fingerprint
from specdec.types.errors import InvalidValueError, UnsupportedModelError

_BUSY_SHARE = 0.25
"""Share of the cores that other processes use on a machine that counts as busy."""


def with_fastest_drafter(
    config: Config,
    progress: Progress,
    measure: MeasureSpeeds | None = None,
) -> Config:
    """Return the configuration with the fastest drafter of its alias, if it leaves that open.

    The configuration keeps its default, the first drafter, where the measurement fails, and where
    all are lookups: their steps cost the same. Raises ModelNotFoundError, and InvalidValueError for
    device cuda without a GPU.

    measure: of the speeds; None for that of this machine.
    """
    speculation = config.speculative_config
    if speculation is None or not speculation.is_auto:
        return config
    source = ALIASES[config.model]
    if measure is None and not any(each.has_weights for each in source.drafters):
        return config
    directory, load = resolve(config.model, progress=progress), LoadOfOthers()
    if (fault := _other_weights(config.model, directory, source)) is not None:
        progress(f"{fault}: drafting with ngram")
        return replace(config, speculative_config=SpeculativeConfig.of())
    try:
        speeds = _speeds(config, progress, measure, load)
    except TrialError as error:
        progress(f"{error}; drafting with {source.drafters[0].name}, the default")
        return config
    chosen = speeds.choose(source.drafters)
    progress(speeds.describe(chosen))
    speculation = SpeculativeConfig.of(**chosen.keys(config.device))
    return replace(config, speculative_config=speculation)


def speeds_of_alias(config: LLMConfig, progress: Progress) -> DrafterSpeeds:
    """Return the speeds of an alias's drafters, as `with_fastest_drafter` compares them.

    Raises InvalidValueError for a model without drafters or with other weights than theirs,
    ModelNotFoundError and TrialError.
    """
    source = ALIASES.get(config.model)
    if source is None or not source.drafters:
        known = ", ".join(name for name, each in ALIASES.items() if each.drafters)
        raise InvalidValueError("model", config.model, f"an alias with drafters ({known})")
    directory, load = resolve(config.model, progress=progress), LoadOfOthers()
    if (fault := _other_weights(config.model, directory, source)) is not None:
        raise TrialError(fault)
    return _speeds(config, progress, None, load)


def _other_weights(name: str, directory: Path, source: PackagedModel) -> str | None:
    """Return why the drafters of an alias do not fit its weights here; None if they do."""
    if weights_fingerprint(directory) == source.weights_sha256:
        return None
    return f"the weights in {directory} are not those that the drafters of {name} were made for"


def _speeds(
    config: LLMConfig, progress: Progress, measure: MeasureSpeeds | None, load: LoadOfOthers
) -> DrafterSpeeds:
    """Return the stored speeds of an alias's drafters, or measure them and store settled ones.

    load: since the checks before, which take most of the time that a sample needs. Raises
    TrialError, and InvalidValueError for device cuda without a GPU.
    """
    drafters = ALIASES[config.model].drafters
    cards = _cards(drafters)
    path = _stored_path(config, drafters, load.share() >= _BUSY_SHARE)
    with suppress(OSError, ValueError, TypeError):
        return speeds_from(json.loads(path.read_bytes()), drafters)
    progress(
        f"measuring the drafters of {config.model} (once for this machine, load and precision)"
    )
    speeds = (measure or measure_in_process)(config, drafters, cards, progress)
    if speeds.is_settled:
        _store(speeds, path, progress)
    return speeds


def _cards(drafters: Sequence[ShippedDrafter]) -> Acceptance:
    try:
        cards = {each.name: read_acceptance(drafter_directory(each.name)) for each in drafters}
    except (OSError, UnsupportedModelError) as error:
        raise TrialError(str(error)) from error
    return comparable(cards)


def _store(speeds: DrafterSpeeds, path: Path, progress: Progress) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(speeds)))
        temporary.replace(path)
    except OSError as error:
        progress(f"the speeds are not stored, and will be measured again: {error}")


def _stored_path(config: LLMConfig, drafters: Sequence[ShippedDrafter], is_busy: bool) -> Path:
    """Return the file of the speeds, whose name has a hash of what they depend on."""
    paths = (drafter_directory(each.name) / CARD for each in drafters)
    cards = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    facts = [
        version("specdec"),
        processor_name(),
        available_cpus(),
        gpu_name() if config.device == "cuda" else None,
        is_busy,
        *(getattr(config, name) for name in MEASURED_SETTINGS),
        *zip(map(repr, drafters), cards, strict=True),
    ]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return default_cache_dir() / "drafters" / f"{config.model}-{key}.json"
