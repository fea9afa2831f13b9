"""Messages of one step between the engine and the workers that run a draft model.

State and named tuples are as in `messages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specdec.types.messages import BASE_MODEL, DraftProbs, StepInput


class DraftRow(NamedTuple):
    """A sequence to draft for: its tokens that the draft model has not run, and how many to draft.

    The first token's position is `num_computed_tokens`. first_index: index of the first token to
    draft, in the target's tokens of the sequence, which may differ from the draft model's.
    adapter_id: as in StepRow, of the draft model's adapter.
    """

    seq_id: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    first_index: int
    adapter_id: int = BASE_MODEL


class AheadRow(NamedTuple):
    """A sequence to draft for while the target verifies its last drafts.

    num_computed_tokens: position of the first token. token_ids: the tokens that the draft model has
        not run, at least the last known one; then `num_drafts` drafts that the target verifies.
    fan_out: [num_drafts + 1]; for each number of accepted drafts, how many tokens that the target
        may add are continued.
    num_draft_tokens: tokens to draft after each of them.
    first_index: as in DraftRow, of the first of the drafts. adapter_id: likewise.
    """

    seq_id: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    num_drafts: int
    fan_out: tuple[int, ...]
    num_draft_tokens: int
    first_index: int
    adapter_id: int = BASE_MODEL

    @property
    def num_known_tokens(self) -> int:
        """Tokens of the sequence without the drafts."""
        return self.num_computed_tokens + len(self.token_ids) - self.num_drafts

    @property
    def known(self) -> tuple[int, ...]:
        """The tokens without the drafts."""
        return self.token_ids[: len(self.token_ids) - self.num_drafts]

    @property
    def drafts(self) -> tuple[int, ...]:
        """The drafts that the target verifies."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree that the draft model runs after the last known token."""
        return self.num_drafts + sum(self.fan_out) * self.num_draft_tokens


@dataclass(frozen=True)
class DraftStep(StepInput):
    """A step of a draft model: `drafts`, which are waited for, then `rows`, then `ahead`.

    `rows` are chunks of text to catch up on; none of them samples. The drafts of `ahead` end early
    when another step arrives.
    """

    drafts: tuple[DraftRow, ...]
    ahead: tuple[AheadRow, ...] = ()


class DraftedRow(NamedTuple):
    """The draft of one sequence, in the draft model's tokens.

    draft_probs: where its verifier needs them; in the target's vocabulary.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    draft_probs: DraftProbs | None = None


@dataclass(frozen=True)
class DraftOutput:
    """The drafts of one step, in the order of its `drafts`."""

    step_id: int
    rows: tuple[DraftedRow, ...]


class Continuation(NamedTuple):
    """The draft after one possible outcome of a row, in the draft model's tokens.

    num_accepted: number of drafts that are accepted. token_id: added by the target.
    draft_token_ids: after it. draft_probs: as in DraftedRow.
    """

    num_accepted: int
    token_id: int
    draft_token_ids: tuple[int, ...]
    draft_probs: DraftProbs | None = None


class AheadDraft(NamedTuple):
    """Continuations of one sequence; those with the same `num_accepted` by likelihood."""

    seq_id: int
    continuations: tuple[Continuation, ...]


class DraftPass(NamedTuple):
    """A forward pass of a draft model: its tokens, and its seconds with sampling."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class AheadOutput:
    """The drafts of the `ahead` rows of one step, in their order.

    passes: that made them. is_whole: whether no other step ended them early. share: part of the
    device's time that the engine may use, where other engines draft on it too.
    """

    step_id: int
    rows: tuple[AheadDraft, ...]
    passes: tuple[DraftPass, ...] = ()
    is_whole: bool = True
    share: float = 1.0
