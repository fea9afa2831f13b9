"""The seam between the engine and whatever drafts."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from typing import Protocol

from specdec.sequences.sequence import Sequence
from specdec.types.messages import DraftProbs
from specdec.types.sampling_params import MAX_NUM_SPECULATIVE_TOKENS, SpeculationMethod

_ALWAYS_GRANTED = MAX_NUM_SPECULATIVE_TOKENS + 1
"""What a step brings a sequence at most: so whoever is up to date stays so."""


class ReadingBudget:
    """Tokens left for one step, shared by whoever has a long text to take in.

    A text that is not taken in whole has no drafts yet; the next step goes on with it.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def grant(self, num_tokens: int) -> int:
        """How many of `num_tokens` new ones a sequence may take in now."""
        granted = min(num_tokens, max(self._num_left, _ALWAYS_GRANTED))
        self._num_left = max(0, self._num_left - granted)
        return granted


@dataclass(frozen=True)
class DraftRequest:
    """A sequence to draft for, and at most how many tokens (0: none yet, but soon).

    max_lookahead_tokens: how many guesses may be run behind the drafts to see what follows them;
        `seq.lookahead` tells it after the step.
    method: what alone is to draft for it, where several methods are loaded; None for all of them.
    """

    seq: Sequence
    max_tokens: int
    max_lookahead_tokens: int = 0
    method: SpeculationMethod | None = None


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for one sequence; none is legal.

    The base stamps say which text was continued: `base_length` tokens that ended in `base_token`.
    The engine discards a proposal whose base is not the sequence's present end.

    draft_probs: what the tokens were drawn from, where the sequence's verifier needs it; None where
        each token was the only one that could come.
    lookahead_token_ids: guesses to run behind the drafts, for what the target says after them.
    method: which of several methods made it; None where one alone is loaded.
    """

    seq_id: int
    base_length: int
    base_token: int
    draft_token_ids: tuple[int, ...]
    draft_probs: DraftProbs | None = None
    lookahead_token_ids: tuple[int, ...] = ()
    method: SpeculationMethod | None = None


class Proposer(Protocol):
    """Drafts for a batch. With a lossless verifier it changes how fast texts come, not how likely.

    `begin` may return before the drafts are made; `collect` waits for those of the last `begin`.
    """

    def begin(self, requests: collections.abc.Sequence[DraftRequest]) -> None:
        """Starts drafting. Sequences hold verified tokens only."""

    def collect(self) -> list[Proposal]:
        """The drafts of the last `begin`, in any order, some perhaps missing."""

    def release(self, seq_id: int) -> None:
        """Forgets a sequence; one that it never saw is no error."""
