"""The messages of one step, between the engine and whoever holds the model.

Small integers, and for requests that need them short lists of probabilities: a sequence's whole
life on a worker (admission, block table, tokens, release) rides in these, in order, so a worker can
never disagree with the engine about it.

Rows are named tuples: each sequence has some in each step, and a frozen dataclass takes two to four
times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.types.sampling_params import StructuredOutput
from specdec.types.sampling_spec import SamplingRules


@dataclass(frozen=True)
class SequenceAdmission:
    """A sequence that the worker does not know yet, or no longer.

    token_ids: all that is known of it, prompt and output; empty where neither the rules nor a
        grammar need it.
    grammar: for a draft worker, what to hold its drafts to; a target gets masks instead.
    """

    seq_id: int
    num_prompt_tokens: int
    rules: SamplingRules
    token_ids: tuple[int, ...] = ()
    grammar: StructuredOutput | None = None


@dataclass(frozen=True)
class BlockTableDelta:
    """From entry `start` on, the sequence's block table is now `block_ids`."""

    seq_id: int
    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DraftProbs:
    """The distributions that some draft tokens were drawn from, one row each.

    Only the tokens that could be drawn are listed; the rest had no chance. Unused places at the end
    of a row have probability 0.
    """

    token_ids: NDArray[np.int32]  # [num_draft_tokens, num_listed]
    probs: NDArray[np.float32]  # [num_draft_tokens, num_listed], each row sums to 1

    def __getitem__(self, drafts: slice) -> DraftProbs:
        return DraftProbs(self.token_ids[drafts], self.probs[drafts])


PENDING_TOKEN = -1
"""Stands for the token that the step before this one yields, which the worker knows first."""


BASE_MODEL = 0
"""The adapter id of a sequence that runs without an adapter."""


class StepRow(NamedTuple):
    """The tokens of one sequence in this step: known ones first, then `num_draft_tokens` drafts.

    The first token's position is `num_computed_tokens`. A row that does not sample is a prefill
    chunk with more of its prompt to come. The only token of a row without guesses may be
    PENDING_TOKEN.

    num_lookahead_tokens: guesses behind the drafts, which are run to see what the target says after
        them and are never verified.

    draft_probs: for verifiers that need them, what the drafts were drawn from; None where each
        draft token was the only one that could come.
    grammar_mask: int32 [num_draft_tokens + 1, ceil(vocab_size / 32)], where bit t % 32 of word
        t // 32 says whether token t may come at that place; None allows all.
    adapter_id: of the adapter that the sequence runs with; BASE_MODEL for none.
    positions: position ids of the tokens, where the drafts are a tree; None for a chain, whose
        positions are consecutive. KV slots are consecutive in both.
    """

    seq_id: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    samples: bool
    draft_probs: DraftProbs | None = None
    grammar_mask: NDArray[np.int32] | None = None
    num_lookahead_tokens: int = 0
    adapter_id: int = BASE_MODEL
    positions: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """Length of the sequence after this step, drafts and lookahead included."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def num_guesses(self) -> int:
        """How many of the tokens are drafts and lookahead."""
        return self.num_draft_tokens + self.num_lookahead_tokens

    @property
    def num_known_tokens(self) -> int:
        """How many of the tokens are no guesses."""
        return len(self.token_ids) - self.num_guesses

    @property
    def known_end(self) -> int:
        """Length of the sequence as it is known, where this row reaches its end."""
        return self.num_computed_tokens + self.num_known_tokens

    @property
    def known(self) -> tuple[int, ...]:
        """The tokens that are no guesses."""
        return self.token_ids[: self.num_known_tokens]

    @property
    def guesses(self) -> tuple[int, ...]:
        """The draft tokens, then the lookahead."""
        return self.token_ids[self.num_known_tokens :]

    @property
    def drafts(self) -> tuple[int, ...]:
        """The draft tokens."""
        return self.guesses[: self.num_draft_tokens]


@dataclass(frozen=True)
class StepInput:
    """One forward pass. `released` is applied first, then `admitted`, then the block tables."""

    step_id: int
    released: tuple[int, ...]
    admitted: tuple[SequenceAdmission, ...]
    block_table_deltas: tuple[BlockTableDelta, ...]
    rows: tuple[StepRow, ...]


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Logarithms of probabilities at consecutive positions: the token's own first, then the best.

    They are of the model's softmax, before any sampling parameter.
    """

    token_ids: NDArray[np.int32]  # [num_positions, 1 + num_best]
    logprobs: NDArray[np.float32]  # [num_positions, 1 + num_best]
    ranks: NDArray[np.int32]  # [num_positions], of the token itself; 1 is the most likely

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, positions: slice) -> Logprobs:
        return Logprobs(self.token_ids[positions], self.logprobs[positions], self.ranks[positions])

    def best(self, count: int) -> Logprobs:
        """With no more than `count` of the best at each position."""
        return Logprobs(self.token_ids[:, : 1 + count], self.logprobs[:, : 1 + count], self.ranks)

    @classmethod
    def join(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Of the positions of all parts, of which there must be one, in order."""
        return cls(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )

    @classmethod
    def nothing(cls, num_best: int) -> Logprobs:
        """Of no positions."""
        shape = (0, 1 + num_best)
        return cls(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(0, np.int32))


class VerifiedRow(NamedTuple):
    """New tokens of a sequence: accepted drafts, then one of the target's own.

    logprobs: of token_ids, where the rules ask for them. has_bad_logits: whether there are no
    tokens because the model computed something that is no number, or because none was allowed.

    lookahead_token_ids: of a row with lookahead tokens, the target's likeliest token after each
        draft token and each lookahead token, whatever came of those before; shaped by no rules.
    next_draft_token_ids: a draft behind token_ids that the rank made itself, by heads on the
        target's hidden states. next_draft_parents: its tree, as in `Proposal`; None for a chain.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: Logprobs | None = None
    has_bad_logits: bool = False
    lookahead_token_ids: tuple[int, ...] = ()
    next_draft_token_ids: tuple[int, ...] = ()
    next_draft_parents: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of the prompt's tokens from index `start` on, which is 1 or more."""

    seq_id: int
    start: int
    logprobs: Logprobs


@dataclass(frozen=True)
class VerifyOutput:
    """The result of one step: one entry for each row that samples, in the rows' order.

    Behind these are entries with bad logits for rows that do not sample and went wrong.
    prompt_logprobs: of the rows that ran a part of a prompt whose rules ask for them.
    """

    step_id: int
    rows: tuple[VerifiedRow, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class DraftRow(NamedTuple):
    """A sequence to draft for: its tokens that the draft model has not run, and how many to add.

    The first token's position is `num_computed_tokens`. first_index: of the first token to add,
    among the tokens of the sequence as the target counts them; a draft model with another
    vocabulary counts its own.
    """

    seq_id: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    first_index: int


@dataclass(frozen=True)
class DraftStep(StepInput):
    """What a draft model does in one step: first `drafts`, which are answered; then `rows`.

    `rows` are chunks of text to catch up on; none of them samples.
    """

    drafts: tuple[DraftRow, ...]


class DraftedRow(NamedTuple):
    """The draft of one sequence, in the draft model's tokens.

    draft_probs: where its verifier needs them; of the target's tokens, for the target to read.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    draft_probs: DraftProbs | None = None


@dataclass(frozen=True)
class DraftOutput:
    """The drafts of one step, in the order of its `drafts`."""

    step_id: int
    rows: tuple[DraftedRow, ...]
