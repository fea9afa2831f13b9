"""A drafter's card: what `specdec eval-drafter --card` measured, by suite and temperature."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.types.errors import UnsupportedModelError, reason_of

CARD = "card.json"
EVALUATION = "evaluation"


def drafter_directory(name: str) -> Path:
    """Return the folder of a drafter of `specdec.config.model_aliases`."""
    return Path(__file__).parent / name


@dataclass(frozen=True)
class SuiteAcceptance:
    """Acceptance on one suite at one temperature.

    draft_share: steps of the target that had a draft, of all its steps. accepted_per_step: accepted
    draft tokens in a step by their position in the draft, over all steps.
    """

    suite: str
    temperature: float
    draft_share: float
    accepted_per_step: tuple[float, ...]

    @property
    def cell(self) -> tuple[str, float]:
        """Suite and temperature."""
        return self.suite, self.temperature

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """Return the mean tokens of a step whose drafts are not longer, the target's included."""
        return 1 + sum(self.accepted_per_step[:num_draft_tokens])

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> SuiteAcceptance:
        """Read a SuiteResult of `specdec.training.evaluation` in JSON."""
        num_steps = max(1, int(result["num_steps"]))
        return cls(
            str(result["suite"]),
            float(result["temperature"]),
            min(1.0, int(result["num_drafts"]) / num_steps),
            tuple(int(count) / num_steps for count in result["num_accepted"]),
        )


def read_acceptance(directory: Path) -> tuple[SuiteAcceptance, ...]:
    """Return the measured acceptance of the drafter in a folder.

    Raises UnsupportedModelError for a card without it.
    """
    path = directory / CARD
    try:
        results = json.loads(path.read_bytes())[EVALUATION]["results"]
        found = tuple(map(SuiteAcceptance.of, results))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} has no evaluation ({reason_of(error)})") from error
    if not found:
        raise UnsupportedModelError(f"{path} has an evaluation without results")
    return found
