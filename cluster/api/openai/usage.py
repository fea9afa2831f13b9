"""The tokens that a request has used, as its response reports them."""

from __future__ import annotations

from typing import Any

from specdec.types.reports.receipts import Receipt
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import LOSSY_VERIFIERS, VerifierName

_DEFAULT_VERIFIER: VerifierName = "coupled"


class UsageMeter:
    """Sum of the usage of one call's prompts. An output counts all choices of its prompt."""

    def __init__(self) -> None:
        self._last: dict[int, EngineOutput] = {}  # by prompt
        self._cached: dict[int, int] = {}  # of choice 0, which computes the prompt

    @property
    def has_output(self) -> bool:
        """Return whether an output was added."""
        return bool(self._last)

    def add(self, prompt: int, output: EngineOutput) -> None:
        """Add an output of the prompt with this index."""
        self._last[prompt] = output
        if output.choice == 0:
            self._cached.setdefault(prompt, output.num_cached_tokens)

    @property
    def receipts(self) -> list[Receipt | None]:
        """The receipt of each prompt, where its last output has one."""
        return [output.receipt for _, output in sorted(self._last.items())]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were generated so far."""
        return sum(each.num_output_tokens for each in self._last.values())

    def usage(self, num_hidden_tokens: int = 0, num_reasoning_tokens: int = 0) -> dict[str, Any]:
        """Return the fields of `Usage` so far.

        num_hidden_tokens: generated, but not part of the answer. num_reasoning_tokens: part of it.
        """
        outputs = [*self._last.values()]
        prompt_tokens = sum([each.num_prompt_tokens for each in outputs])
        completion_tokens = self.num_output_tokens - num_hidden_tokens
        drafts = SpeculationStats.sum([each.speculation for each in outputs])
        predicted = SpeculationStats.sum([each.prediction for each in outputs])
        verifier = outputs[-1].verifier if outputs else _DEFAULT_VERIFIER
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(self._cached.values()),
                "cache_write_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": num_reasoning_tokens,
                "accepted_prediction_tokens": predicted.num_accepted_tokens,
                "rejected_prediction_tokens": predicted.num_rejected_tokens,
                "speculation": {
                    **vars(drafts),
                    "acceptance_rate": drafts.acceptance_rate,
                    "mean_acceptance_length": drafts.mean_acceptance_length,
                    "verifier": verifier,
                    "is_lossless": verifier not in LOSSY_VERIFIERS,
                },
            },
        }
