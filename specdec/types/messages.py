"""Messages of one step between the engine and the workers that run the models.

Small integers, and short lists of probabilities for requests that need them. All state of a
sequence on a worker (admission, block table, tokens, release) follows from these messages in
order, so a worker cannot disagree with the engine about it.

Rows are named tuples: each sequence has one or more in each step, and a frozen dataclass takes two
to four times as long to create.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.types.drafts import draft_tree
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import SamplingRules


class Snapshot(NamedTuple):
    """A copy of the states of a sequence's recurrent layers. slot: of the ranks' copies.

    position: number of tokens after which it was taken.
    """

    slot: int
    position: int


@dataclass(frozen=True)
class SequenceAdmission:
    """A sequence that is new to the worker, or was released there.

    token_ids: its tokens so far, prompt and output; empty where no rule, grammar or head needs
        them.
    grammar: for a draft worker, the grammar of its drafts; a target receives masks instead.
    is_trial: whether its rows may begin anywhere, because their results are not used.
    snapshot: that its states are copied from; None where its first row begins at position 0.
    """

    seq_id: int
    num_prompt_tokens: int
    rules: SamplingRules
    token_ids: tuple[int, ...] = ()
    grammar: StructuredOutput | None = None
    is_trial: bool = False
    snapshot: Snapshot | None = None


class BlockTableDelta(NamedTuple):
    """Change of a sequence's block table: from entry `start` on it is `block_ids`."""

    seq_id: int
    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DraftProbs:
    """The distributions that draft tokens were drawn from, one row each.

    Only tokens with a probability above 0 are listed. Unused places at the end of a row have
    probability 0. For verifier `confidence` a row lists the draft token alone.
    """

    token_ids: NDArray[np.int32]  # [num_draft_tokens, num_listed]
    probs: NDArray[np.float32]  # [num_draft_tokens, num_listed], each whole row sums to 1

    def __getitem__(self, drafts: slice) -> DraftProbs:
        return DraftProbs(self.token_ids[drafts], self.probs[drafts])


PENDING_TOKEN = -1
"""Placeholder for the token that the previous step yields, which the worker knows first."""


BASE_MODEL = 0
"""The adapter id of a sequence that runs without an adapter."""


class RowDrafting(NamedTuple):
    """The drafts of a row beyond a chain without probabilities, and those that its rank makes.

    probs: for verifiers that need them, the distributions that the drafts were drawn from; None
        where each draft token was the only possible one, or its probability is unknown.
    parents: tree of the drafts, as in `types.drafts.draft_tree`; None for a chain. KV slots are
        consecutive in both. A tree has neither probabilities nor lookahead tokens.
    by_token: for PENDING_TOKEN after all drafts of the row before, a tuple for each token with a
        draft: this token, then the draft after it. `StepRow.resolved` selects one of them.
    num_held: for PENDING_TOKEN, maximum number of draft tokens to take from those that the rank's
        head has made after that token. `StepRow.resolved` takes them.
    held_depth: where these may be a tree, most of them that follow each other; 0 for its first path
        alone.
    num_next: draft tokens that the rank's head makes after what the row yields, for the next step.
        0: the head does not run. For a prefill chunk any other number lets it run the chunk, so
        that it can draft when the prompt ends.
    next_depth: where the next draft is to be a tree, most of its tokens that follow each other; 0
        for a chain.
    num_lookup: draft tokens that the rank looks up after what the row yields, in place of its
        head's where the text has occurred before.
    """

    probs: DraftProbs | None = None
    parents: tuple[int, ...] | None = None
    by_token: tuple[tuple[int, ...], ...] = ()
    num_held: int = 0
    held_depth: int = 0
    num_next: int = 0
    next_depth: int = 0
    num_lookup: int = 0

    def resolved(
        self, num_held: int, depth: int, parents: draft_tree.Parents | None
    ) -> RowDrafting:
        """Return it for a row whose token is known. parents: of the draft after this token.

        num_held, depth: what was wanted of the drafts that the head has made.
        """
        following = (self.num_next, self.next_depth, self.num_lookup)
        head = (num_held, depth if depth < num_held else 0, *following)
        return RowDrafting(None, tuple(parents), (), *head) if parents else head_drafting(*head)


@lru_cache(maxsize=4096)
def head_drafting(
    num_held: int, held_depth: int, num_next: int, next_depth: int, num_lookup: int
) -> RowDrafting:
    """Return the drafting of rows of chains for which a rank drafts; equal rows share the record.

    Serialization writes a shared record once.
    """
    return RowDrafting(None, None, (), num_held, held_depth, num_next, next_depth, num_lookup)


PLAIN_DRAFTING = head_drafting(0, 0, 0, 0, 0)
"""Drafting of rows whose drafts, if any, are a chain without probabilities."""


class StepRow(NamedTuple):
    """The tokens of one sequence in this step: known ones first, then `num_draft_tokens` drafts.

    The first token's position is `num_computed_tokens`. A row that does not sample is a prefill
    chunk, and more of its prompt follows. The only token of a row without guesses may be
    PENDING_TOKEN. After drafts its position is then pending too, and the given one is the highest
    that is possible.

    drafting: how its drafts are verified, and which others its rank takes and makes.
    grammar_mask: int32 [num_draft_tokens + 1, ceil(vocab_size / 32)], where bit t % 32 of word
        t // 32 is set if token t is allowed at that position; None allows all.
    num_lookahead_tokens: guesses after the drafts, which are run for the target's predictions
        after them and are never verified.
    adapter_id: of the adapter that the sequence runs with; BASE_MODEL for none.
    max_end: of a pending row, the greatest `end` with which all its drafts could become output.
        It is `open_length` of its sequence, unless that is 0.
    """

    seq_id: int
    num_computed_tokens: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    samples: bool
    drafting: RowDrafting = PLAIN_DRAFTING
    grammar_mask: NDArray[np.int32] | None = None
    num_lookahead_tokens: int = 0
    adapter_id: int = BASE_MODEL
    max_end: int = 0

    def resolved(
        self,
        position: int,
        token: int,
        held: tuple[int, ...] = (),
        held_parents: draft_tree.Parents | None = None,
    ) -> StepRow:
        """Return the row with `token` in place of PENDING_TOKEN, and the draft after it.

        position: of the token; below the row's own if drafts before it were rejected. held,
        held_parents: the draft that a head has made after it. The result's num_held and held_depth
        are what was wanted of these.
        """
        drafting = self.drafting
        if not (drafting.by_token or drafting.num_held):
            # By place, which takes half of the time of `_replace`, in each step for each row.
            return StepRow(self.seq_id, position, (token,), *self[3:])
        by_token = drafting.by_token if position == self.num_computed_tokens else ()
        num_useful = max(0, self.max_end - position - 1)
        matches = (each[1 : 1 + num_useful] for each in by_token if each[0] == token)
        num_held = min(drafting.num_held, num_useful)
        depth = min(drafting.held_depth or num_held, num_held)
        wanted, parents = draft_tree.wanted_part(held, held_parents, num_held, depth)
        draft = next(matches, wanted)
        return self._replace(
            num_computed_tokens=position,
            token_ids=(token, *draft),
            num_draft_tokens=len(draft),
            drafting=drafting.resolved(num_held, depth, parents),
        )

    @property
    def is_pending(self) -> bool:
        """Return whether its token is not known yet."""
        return self.token_ids[0] == PENDING_TOKEN

    @property
    def end(self) -> int:
        """Length of the sequence after this step, drafts and lookahead included."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def num_guesses(self) -> int:
        """Number of draft and lookahead tokens."""
        return self.num_draft_tokens + self.num_lookahead_tokens

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens that are no guesses."""
        return len(self.token_ids) - self.num_draft_tokens - self.num_lookahead_tokens

    @property
    def known_end(self) -> int:
        """Length of the known sequence, if this row reaches its end."""
        # By place: computed, all, draft and lookahead tokens.
        return self[1] + len(self[2]) - self[3] - self[7]

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

    @property
    def depths(self) -> Sequence[int]:
        """Number of drafts on the path to the last known token (0) and to each draft."""
        if self.drafting.parents is None:
            return range(self.num_draft_tokens + 1)
        return (0, *draft_tree.depths(self.drafting.parents))

    @property
    def draft_depth(self) -> int:
        """Most drafts that can be accepted."""
        return self.num_draft_tokens if self.drafting.parents is None else max(self.depths)

    @property
    def paths(self) -> Sequence[Sequence[int]]:
        """Indices of the drafts on the path to the last known token (none) and to each draft."""
        if self.drafting.parents is None:
            return [range(count) for count in range(self.num_draft_tokens + 1)]
        return ((), *draft_tree.paths(self.drafting.parents))

    def accepted_drafts(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the indices of the drafts with which new tokens begin."""
        if not self.num_draft_tokens:
            return range(0)
        if self.drafting.parents is not None:
            return draft_tree.path_of(self.drafts, self.drafting.parents, token_ids)
        return range(self.num_accepted(token_ids))

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """Return the number of drafts with which new tokens begin."""
        if self.drafting.parents is not None:
            return len(self.accepted_drafts(token_ids))
        count, first = 0, len(self.token_ids) - self.num_draft_tokens - self.num_lookahead_tokens
        for place in range(min(self.num_draft_tokens, len(token_ids))):
            if self.token_ids[first + place] != token_ids[place]:
                break
            count += 1
        return count


@dataclass(frozen=True)
class StepInput:
    """One forward pass. `released` is applied first, then `admitted`, then the block tables.

    rows: `sequences.decode_rows.RepeatedRows` where they follow from those of the step before.
    saves: snapshots to take after the pass, with the ids of their sequences.
    """

    step_id: int
    released: tuple[int, ...]
    admitted: tuple[SequenceAdmission, ...]
    block_table_deltas: tuple[BlockTableDelta, ...]
    rows: Sequence[StepRow]
    saves: tuple[tuple[int, Snapshot], ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities at consecutive positions: of the token itself, the best and the given ones.

    They are those of the model's softmax, before any sampling parameter.
    """

    token_ids: NDArray[np.int32]  # [num_positions, 1 + num_best + num_given]
    logprobs: NDArray[np.float32]  # like token_ids
    ranks: NDArray[np.int32]  # [num_positions], of the token itself; 1 is the most likely
    num_given: int = 0  # last columns, of the tokens that the request names

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, positions: slice) -> Logprobs:
        columns = self.token_ids[positions], self.logprobs[positions]
        return Logprobs(*columns, self.ranks[positions], self.num_given)

    @property
    def num_best(self) -> int:
        """Number of most likely tokens at each position."""
        num_listed: int = self.token_ids.shape[1]
        return num_listed - 1 - self.num_given

    def best(self, count: int, num_given: int = 0) -> Logprobs:
        """Return at most `count` of the best and the first `num_given` of the given ones."""
        end = 1 + min(count, self.num_best)
        if not num_given:
            return Logprobs(self.token_ids[:, :end], self.logprobs[:, :end], self.ranks)
        first = 1 + self.num_best
        kept = [*range(end), *range(first, first + num_given)]
        return Logprobs(self.token_ids[:, kept], self.logprobs[:, kept], self.ranks, num_given)

    @classmethod
    def join(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Concatenate the positions of one part or more."""
        return cls(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            parts[0].num_given,
        )

    @classmethod
    def nothing(cls, num_best: int, num_given: int) -> Logprobs:
        """Return log-probabilities of no position."""
        shape = (0, 1 + num_best + num_given)
        columns = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        return cls(*columns, np.zeros(0, np.int32), num_given)


class VerifiedRow(NamedTuple):
    """New tokens of a sequence: accepted drafts, then one of the target's own.

    logprobs: of token_ids, where the rules ask for them. has_bad_logits: whether there are no
    tokens because the logits contain NaN or Inf, or because no token was allowed.

    lookahead_token_ids: for a row with lookahead tokens, the target's most likely token after each
        draft and lookahead token, whether those before were accepted or not; by raw logits.
    next_draft_token_ids: a draft after token_ids that the rank made itself, by heads on the
        target's hidden states, or by lookup where next_draft_is_lookup is True. next_draft_parents:
        its tree, as in `Proposal`; None for a chain.
    next_draft_confidences: for each token of that draft, the probability in thousandths of the most
        likely one at its place, where a budget over the batch needs them.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: Logprobs | None = None
    has_bad_logits: bool = False
    lookahead_token_ids: tuple[int, ...] = ()
    next_draft_token_ids: tuple[int, ...] = ()
    next_draft_parents: tuple[int, ...] | None = None
    next_draft_confidences: tuple[int, ...] = ()
    next_draft_is_lookup: bool = False


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from index `start` on, which is 1 or more."""

    seq_id: int
    start: int
    logprobs: Logprobs


@dataclass(frozen=True)
class VerifyOutput:
    """The result of one step: one entry for each row that samples, in the rows' order.

    Between or after these are entries with bad logits for failed rows that do not sample.
    prompt_logprobs: of the rows that ran a part of a prompt, if their rules request them.
    """

    step_id: int
    rows: Sequence[VerifiedRow]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
