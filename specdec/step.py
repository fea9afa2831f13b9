"""The messages of one step, between the engine and whoever holds the model.

Only small integers: a sequence's whole life on a worker (admission, block table, tokens, release)
rides in these, in order, so a worker can never disagree with the engine about it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceAdmission:
    """A sequence that the worker does not know yet, or no longer."""

    seq_id: int
    num_prompt_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int  # index among the n choices of the request


@dataclass(frozen=True)
class BlockTableDelta:
    """From entry `start` on, the sequence's block table is now `block_ids`."""

    seq_id: int
    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class StepRow:
    """The tokens of one sequence in this step: known ones first, then `num_draft_tokens` drafts.

    The first token's position is `num_computed_tokens`. A row that does not sample is a prefill
    chunk with more of its prompt to come.
    """

    seq_id: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    samples: bool

    @property
    def end(self) -> int:
        """Length of the sequence after this step, the drafts included."""
        return self.num_computed_tokens + len(self.token_ids)


@dataclass(frozen=True)
class StepInput:
    """One forward pass. `released` is applied first, then `admitted`, then the block tables."""

    step_id: int
    released: tuple[int, ...]
    admitted: tuple[SequenceAdmission, ...]
    block_table_deltas: tuple[BlockTableDelta, ...]
    rows: tuple[StepRow, ...]


@dataclass(frozen=True)
class VerifiedRow:
    """New tokens of a sequence: accepted drafts, then one of the target's own."""

    seq_id: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class VerifyOutput:
    """The result of one step: one entry for each row that samples, in the rows' order."""

    step_id: int
    rows: tuple[VerifiedRow, ...]


@dataclass(frozen=True)
class DraftRow:
    """A sequence to draft for: its tokens that the draft model has not run, and how many to add.

    The first token's position is `num_computed_tokens`.
    """

    seq_id: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int


@dataclass(frozen=True)
class DraftStep(StepInput):
    """What a draft model does in one step: first `drafts`, which are answered; then `rows`.

    `rows` are chunks of text to catch up on; none of them samples.
    """

    drafts: tuple[DraftRow, ...]


@dataclass(frozen=True)
class DraftedRow:
    """The draft of one sequence."""

    seq_id: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class DraftOutput:
    """The drafts of one step, in the order of its `drafts`."""

    step_id: int
    rows: tuple[DraftedRow, ...]
