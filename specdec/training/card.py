"""Writes what was measured of a drafter to its card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.config.llm import LLMConfig
from specdec.models.drafters.card import EVALUATION
from specdec.training.atomic_files import write_atomically
from specdec.training.evaluation import SuiteResult
from specdec.types.errors import InvalidValueError

_SPEEDS = ("tokens_per_s", "baseline_tokens_per_s", "speedup")


def read_card(path: Path) -> dict[str, Any]:
    """Return the content of a card; an empty one where there is no file.

    Raises InvalidValueError for another file.
    """
    if not path.exists():
        return {}
    try:
        card = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        card = None
    if not isinstance(card, dict):
        raise InvalidValueError("card", path, "a file with a JSON object, or a new file")
    return card


def write_evaluation(
    path: Path, config: LLMConfig, settings: Mapping[str, Any], results: Sequence[SuiteResult]
) -> None:
    """Replace the evaluation of a card, durably; its other entries are kept.

    config: of the engine that drafted. settings: of the measurement, by name. Speeds are left out:
    they are those of a machine, and the card goes with the drafter.
    """
    speculation = config.speculative_config
    assert speculation is not None, "nothing drafted"
    evaluation = {
        "target": config.model,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "method": speculation.method,
        "num_speculative_tokens": speculation.num_speculative_tokens,
        **settings,
        "results": [_without_speeds(each) for each in results],
    }
    card = {**read_card(path), EVALUATION: evaluation}
    text = json.dumps(card, ensure_ascii=False, indent=2) + "\n"
    write_atomically(path, text.encode())


def _without_speeds(result: SuiteResult) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name not in _SPEEDS}
