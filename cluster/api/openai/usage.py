"""Token usage of requests, in the API's format."""

from __future__ import annotations

from cluster.api.openai.schema import (
    CompletionTokensDetails,
    PromptTokensDetails,
    SpeculationUsage,
    Usage,
)
from specdec.types.outputs import EngineOutput
from specdec.types.sampling_params import LOSSY_VERIFIERS, VerifierName
from specdec.types.stats import SpeculationStats


class UsageMeter:
    """Sum of the usage of one call's prompts. An output counts all choices of its prompt."""

    def __init__(self) -> None:
        self._last: dict[int, EngineOutput] = {}  # by prompt
        self._cached: dict[int, int] = {}  # of choice 0, which computes the prompt

    @property
    def has_output(self) -> bool:
        """Whether an output was added."""
        return bool(self._last)

    def add(self, prompt: int, output: EngineOutput) -> None:
        """Add an output of the prompt with this index."""
        self._last[prompt] = output
        if output.choice == 0:
            self._cached.setdefault(prompt, output.num_cached_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were generated so far."""
        return sum(each.num_output_tokens for each in self._last.values())

    def usage(self, num_hidden_tokens: int = 0) -> Usage:
        """Return the usage so far. num_hidden_tokens: generated, but not part of the answer."""
        prompt_tokens = sum(each.num_prompt_tokens for each in self._last.values())
        completion_tokens = self.num_output_tokens - num_hidden_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
            completion_tokens_details=CompletionTokensDetails(speculation=self._speculation()),
        )

    def _speculation(self) -> SpeculationUsage:
        outputs = [*self._last.values()]
        stats = SpeculationStats.sum(output.speculation for output in outputs)
        verifier = outputs[-1].verifier if outputs else _DEFAULT_VERIFIER
        return SpeculationUsage(
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            acceptance_rate=stats.acceptance_rate,
            mean_acceptance_length=stats.mean_acceptance_length,
            verifier=verifier,
            is_lossless=verifier not in LOSSY_VERIFIERS,
        )


_DEFAULT_VERIFIER: VerifierName = "coupled"
