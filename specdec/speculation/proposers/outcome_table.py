"""Drafts that were made ahead for the possible outcomes of a row, and their use when one occurs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.speculation.proposers.cross_vocab.retokenizer import num_equal
from specdec.types.messages import DraftProbs


class AheadRound(NamedTuple):
    """A row that the target runs. Its text had `base_length` tokens and was sent with `drafts`."""

    base_length: int
    drafts: tuple[int, ...]

    def outcome(self, text: Sequence[int]) -> Outcome | None:
        """Return the outcome by the present text; None while there is no new token."""
        new = text[self.base_length :]
        if not new:
            return None
        num_accepted = min(num_equal(self.drafts, new), len(new) - 1)
        return Outcome(num_accepted, new[num_accepted])


class Outcome(NamedTuple):
    """Number of accepted drafts of a row, and the token that the target has added to them."""

    num_accepted: int
    token_id: int


class AheadTokens(NamedTuple):
    """Draft after an outcome, in the target's tokens. draft_probs: as in Proposal."""

    token_ids: tuple[int, ...]
    draft_probs: DraftProbs | None = None


@dataclass
class OutcomeTable:
    """Drafts after the enumerated outcomes of one round.

    by_outcome: those with the same number of accepted drafts by likelihood.
    """

    round: AheadRound
    by_outcome: dict[Outcome, AheadTokens] = field(default_factory=dict)

    @classmethod
    def of(cls, round_: AheadRound, entries: Iterable[tuple[Outcome, AheadTokens]]) -> OutcomeTable:
        """Make a table; of equal outcomes the first one counts."""
        table = cls(round_)
        for outcome, tokens in entries:
            table.by_outcome.setdefault(outcome, tokens)
        return table

    def rank(self, outcome: Outcome) -> int | None:
        """Return the outcome's index among those with its number of accepted drafts, if listed."""
        listed = self._listed(outcome.num_accepted)
        return listed.index(outcome) if outcome in listed else None

    def num_tried(self, num_accepted: int) -> int:
        """Return how many outcomes with that number of accepted drafts are listed."""
        return len(self._listed(num_accepted))

    def continuing(self, text: Sequence[int]) -> AheadTokens | None:
        """Return the draft that continues `text`, as far as it was made; None where none does.

        A text that has grown by more than the round keeps the rest of the draft that predicted it.
        Draft probabilities hold for the round after the outcome alone: the noise of a sampled
        draft is keyed by its place in the round that verifies it. Then there is no rest.
        """
        outcome = self.round.outcome(text)
        found = None if outcome is None else self.by_outcome.get(outcome)
        if outcome is None or found is None:
            return None
        since = text[self.round.base_length + outcome.num_accepted + 1 :]
        if not since:
            return found if found.token_ids else None
        count = len(since)
        is_continued = found.token_ids[:count] == tuple(since) and len(found.token_ids) > count
        if not is_continued or found.draft_probs is not None:
            return None
        return AheadTokens(found.token_ids[count:])

    def _listed(self, num_accepted: int) -> list[Outcome]:
        return [each for each in self.by_outcome if each.num_accepted == num_accepted]
