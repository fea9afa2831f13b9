"""Acceptance rates of the verifier `synthetic`, from vLLM's keys of speculative_config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS, VerifierName
from specdec.types.validation import require_range

_RATE = "speculative_config.synthetic_acceptance_rate"
_RATES = "speculative_config.synthetic_acceptance_rates"
_LENGTH = "speculative_config.synthetic_acceptance_length"


@dataclass(frozen=True)
class SyntheticAcceptance:
    """Acceptance of drafts of `num_draft_tokens`, by exactly one of three values.

    rate: probability that a draft token is accepted if those before it were, at every place.
    rates: probability of each place that its draft token and all before it are accepted.
    length: mean number of tokens that a draft yields, the target's own token included. The number
        of accepted tokens is then one of the two whole numbers around length - 1.
    """

    num_draft_tokens: int
    rate: float | None = None
    rates: tuple[float, ...] = ()
    length: float | None = None

    def check(self, allowed: Sequence[VerifierName]) -> None:
        """Raise InvalidValueError unless one value is given and valid if `synthetic` is allowed."""
        given = {_RATE: self.rate, _RATES: self.rates or None, _LENGTH: self.length}
        names = [name for name, value in given.items() if value is not None]
        if "synthetic" not in allowed:
            if names:
                limit = "left out unless synthetic is one of allowed_verifiers"
                raise InvalidValueError(names[0], given[names[0]], limit)
            return
        if len(names) != 1:
            limit = "accompanied by exactly one of synthetic_acceptance_rate, "
            limit += "synthetic_acceptance_rates and synthetic_acceptance_length"
            raise InvalidValueError("speculative_config.verifier", "synthetic", limit)
        require_range(_RATE, self.rate, 0, 1)
        require_range(_LENGTH, self.length, 1, self.num_draft_tokens + 1)
        if self.rates:
            self._check_rates()

    def _check_rates(self) -> None:
        if len(self.rates) != self.num_draft_tokens:
            limit = f"a list of num_speculative_tokens ({self.num_draft_tokens}) numbers"
            raise InvalidValueError(_RATES, self.rates, limit)
        for index, rate in enumerate(self.rates):
            require_range(f"{_RATES}[{index}]", rate, 0, 1)
        if any(later > earlier for earlier, later in pairwise(self.rates)):
            limit = "a list in which no number exceeds the one before it"
            raise InvalidValueError(_RATES, self.rates, limit)

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """Probability of each place that its draft token is accepted if those before it were."""
        if self.rate is not None:
            return (self.rate,) * MAX_NUM_SPECULATIVE_TOKENS
        marginals = (1.0, *self._marginals)
        return tuple(later / earlier if earlier else 0.0 for earlier, later in pairwise(marginals))

    @property
    def _marginals(self) -> tuple[float, ...]:
        if self.length is None:
            return self.rates
        num_accepted = self.length - 1
        return tuple(
            min(1.0, max(0.0, num_accepted - place)) for place in range(self.num_draft_tokens)
        )
