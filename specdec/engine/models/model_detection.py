"""Completes a configuration from the files of its models, before they are resolved.

`--model` may be a head whose files name its target, and the method of a draft may be left out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.config.llm import Config
from specdec.config.speculation.methods import METHODS, DraftModelConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.heads.config import (
    method_of,
    named_target,
    separate_head_method_of,
    suggested_draft_tokens,
)
from specdec.models.heads.formats.detect import PARD
from specdec.models.hub import Progress
from specdec.models.resolve import local_path, resolve
from specdec.types.errors import ModelNotFoundError
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS


def with_detected_models(config: Config, progress: Progress, *, downloads: bool = True) -> Config:
    """Return the configuration with the target and the drafting method that the files give.

    downloads: False leaves a model open that is not in a directory here. Raises ModelNotFoundError
    for a model or target that is not available, UnsupportedModelError where the files leave the
    method open, and InvalidValueError for keys that the method does not have.
    """
    found = _with_named_target(config, progress, downloads=downloads)
    return _with_detected_method(found, progress, downloads=downloads)


def _with_named_target(config: Config, progress: Progress, *, downloads: bool) -> Config:
    """Replace a model that is a head by the target that its config.json names."""
    directory = _located(config.model, progress, downloads=downloads)
    name = None if directory is None else named_target(directory)
    if directory is None or name is None:
        return config
    method = separate_head_method_of(directory)
    if method is None:
        return config  # a model that names the one it was fine-tuned from
    target = _target_of(directory, name, progress, downloads=downloads)
    progress(f"{config.model} is a head for method {method}; its target is {target}")
    speculation = config.speculative_config
    if speculation is not None and _is_open(speculation) and _draft_model(speculation) is None:
        speculation = _with_method(speculation, method, directory, model=config.model)
    return replace(config, model=target, speculative_config=speculation)


def _target_of(directory: Path, name: str, progress: Progress, *, downloads: bool) -> str:
    """Return the target's name for `resolve`; a path may be relative to the head's directory.

    Raises ModelNotFoundError if it is not available.
    """
    beside = local_path(str(directory / name)) if name.startswith(".") else None
    if beside is not None and beside.is_dir():
        return str(beside.resolve())
    try:
        _located(name, progress, downloads=downloads)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{directory} is a head for the target {name!r}, which is not available: {error}; set "
            "model to a copy of the target, and speculative_config.model to the head"
        ) from error
    return name


def _with_detected_method(config: Config, progress: Progress, *, downloads: bool) -> Config:
    """Set a method that was left out beside a model to the one that the model's files are for."""
    speculation = config.speculative_config
    if speculation is None or not _is_open(speculation):
        return config
    model = _draft_model(speculation)
    directory = _located(model, progress, downloads=downloads, may_be_pickled=True)
    if directory is None:
        return config
    method = method_of(directory)
    progress(f"{model}: method {method}, by its files")
    return replace(config, speculative_config=_with_method(speculation, method, directory))


def _is_open(speculation: SpeculativeConfig) -> bool:
    return "method" in speculation.left_out


def _draft_model(speculation: SpeculativeConfig) -> str | None:
    drafter = speculation.drafter
    return drafter.model if isinstance(drafter, DraftModelConfig) else None


def _with_method(
    speculation: SpeculativeConfig, method: str, directory: Path, **keys: Any
) -> SpeculativeConfig:
    """Return the configuration with a detected method, and the draft length that its files suggest.

    Parallel drafting follows from the files as well.
    """
    if method == PARD:
        return speculation.with_method(DraftModelConfig.name, parallel_drafting=True)
    if METHODS[method].parallel_of is not None:
        keys["parallel_drafting"] = False
    suggested = suggested_draft_tokens(directory)
    if suggested is not None and "num_speculative_tokens" in speculation.left_out:
        keys["num_speculative_tokens"] = min(suggested, MAX_NUM_SPECULATIVE_TOKENS)
    return speculation.with_method(method, **keys)


def _located(
    name: str | None, progress: Progress, *, downloads: bool, may_be_pickled: bool = False
) -> Path | None:
    """Return the directory of a model; None if it would have to be looked for elsewhere."""
    if name is None:
        return None
    path = local_path(name)
    if not downloads and (path is None or not path.is_dir()):
        return None
    return resolve(name, progress=progress, may_be_pickled=may_be_pickled)
