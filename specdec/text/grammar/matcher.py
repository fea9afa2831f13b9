"""The tokens that a compiled grammar allows next, and the drafts and outputs of one sequence.

Where a grammar allows only one text, only that text's canonical tokenization is allowed, so its
tokens are forced; elsewhere any tokenization of an allowed text is allowed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from threading import Event
from typing import Self

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from specdec.text.grammar.translation import plain_reason
from specdec.types.drafts.draft_tree import BASE, first_path, is_chain, paths, subtree
from specdec.types.errors import GrammarError
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS, StructuredOutput

MAX_SHARING = 32
"""Maximum number of sequences that one copy of a grammar is handed out for; they share its lexer.
"""

MAX_CONSTRAINED_NODES = 16
"""Most nodes of a tree of drafts under a grammar: the mask of each takes some ten microseconds."""

MAX_EARLIER_STATES = 2 * MAX_NUM_SPECULATIVE_TOKENS
"""Most tokens that can be undone in a grammar that llguidance does not roll back."""

ALL_ALLOWED = np.int32(-1)
"""A word of a mask that forbids nothing."""


def mask_words(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """Return a mask, int32 [ceil(vocab_size / 32)], with the bits of `token_ids` set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, for one vocabulary. Thread-safe.

    start: a matcher before the first token; it is copied and never advanced.
    text_mask: int32 [num_words], the tokens that may be in an output, or end it.
    eos_token_ids: tokens that end an output.
    compile_s: CPU time of the compilation.
    rolls_back: whether llguidance rolls it back: no lexeme has `max_tokens` or `stop`.
    others: further copies, each for the next MAX_SHARING choices of a request.
    """

    spec: StructuredOutput
    start: LLMatcher
    text_mask: NDArray[np.int32]
    eos_token_ids: frozenset[int]
    compile_s: float
    rolls_back: bool
    others: tuple[Grammar, ...] = ()
    _exhausted: Event = field(default_factory=Event)

    @property
    def is_exhausted(self) -> bool:
        """Return whether the lexer of this copy has no states left for further sequences."""
        return self._exhausted.is_set()

    def of_choice(self, choice: int) -> Grammar:
        """Return the copy for a choice of the request that it was handed out for."""
        copies = (self, *self.others)
        return copies[choice // MAX_SHARING % len(copies)]

    def matcher(self) -> TokenMatcher:
        """Make a matcher for one sequence, before its first token."""
        return GrammarMatcher(self)

    def exhaust(self) -> None:
        """Mark this copy as exhausted, so that no further sequence uses it."""
        self._exhausted.set()


class TokenMatcher(ABC):
    """State of one sequence in a grammar. Not thread-safe.

    Every method raises GrammarError once the grammar has exceeded its limits of time and memory (an
    ambiguous grammar, a regular expression with too many states).
    """

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Return whether only an end-of-sequence token is allowed, or one was consumed."""

    @abstractmethod
    def advance(self, token_id: int) -> None:
        """Consume a token; raise GrammarError, with the state unchanged, if it is not allowed."""

    @abstractmethod
    def copy(self) -> Self:
        """Return a matcher in the same state to advance and drop: it is never rolled back."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens. No mask may have been computed after any of them."""

    @abstractmethod
    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Return the length of the prefix of `token_ids` that is allowed."""

    @abstractmethod
    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        """Return up to `limit` forced tokens, the only ones that are allowed; may be empty."""

    @abstractmethod
    def allowed_mask(self) -> NDArray[np.int32]:
        """Return the mask of allowed tokens, int32 [num_words]: bit t % 32 of word t // 32.

        The caller must not change it.
        """

    def masks_along(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return the masks after each prefix of `token_ids`, int32 [len(token_ids) + 1, num_words].

        The state does not change. Masks after an invalid token allow all tokens, since they are
        never used.
        """
        there, num_valid = self.copy(), self.num_valid(token_ids)
        first = there.allowed_mask()
        masks = np.full((len(token_ids) + 1, len(first)), ALL_ALLOWED)
        masks[0] = first
        for index in range(num_valid):
            there.advance(token_ids[index])
            masks[index + 1] = there.allowed_mask()
        return masks


class GrammarMatcher(TokenMatcher):
    """State of one sequence in a grammar of the whole output."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.start.deep_copy()
        # llguidance does not count these, and would roll back other tokens instead.
        self._num_ends_after_stop = 0
        self._earlier: deque[LLMatcher] | None = None  # of what llguidance does not roll back
        if not grammar.rolls_back:
            self._earlier = deque(maxlen=MAX_EARLIER_STATES)

    @property
    def is_finished(self) -> bool:
        """See TokenMatcher."""
        is_stopped = self._matcher.is_stopped()
        self._check()
        return is_stopped

    def advance(self, token_id: int) -> None:
        """See TokenMatcher."""
        if self.is_finished and token_id in self._grammar.eos_token_ids:
            self._num_ends_after_stop += 1
            return
        earlier = None if self._earlier is None else self._matcher.deep_copy()
        if self._matcher.try_consume_tokens([token_id]) != 1:
            self._matcher.compute_bitmask()  # reports an exhausted lexer, which consuming does not
            self._check()
            raise GrammarError(f"token {token_id} is not allowed by structured_output")
        if self._earlier is not None and earlier is not None:
            self._earlier.append(earlier)

    def copy(self) -> Self:
        """See TokenMatcher."""
        there = copy(self)
        there._matcher, there._earlier = self._matcher.deep_copy(), None
        return there

    def rollback(self, count: int) -> None:
        """See TokenMatcher.

        llguidance keeps its last mask, and returns it for a text of as many lexemes after these.
        """
        num_ends = min(count, self._num_ends_after_stop)
        self._num_ends_after_stop -= num_ends
        if count > num_ends:
            self._undo(count - num_ends)
            self._check()

    def _undo(self, count: int) -> None:
        if self._earlier is None:
            self._matcher.rollback(count)
            return
        if count > len(self._earlier):
            raise GrammarError(f"structured_output cannot be undone by {count} tokens")
        for _ in range(count):
            self._matcher = self._earlier.pop()

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """See TokenMatcher."""
        num_valid = self._num_consumable(list(token_ids))
        self._check()
        rest = token_ids[num_valid:]
        may_end = rest and rest[0] in self._grammar.eos_token_ids
        if may_end and self._is_finished_after(token_ids[:num_valid]):
            return num_valid + 1  # llguidance does not count a forced end token
        return num_valid

    def _num_consumable(self, token_ids: list[int]) -> int:
        if self._grammar.rolls_back:
            return int(self._matcher.validate_tokens(token_ids))
        # validate_tokens ignores max_tokens.
        return int(self._matcher.deep_copy().try_consume_tokens(token_ids))

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        """See TokenMatcher."""
        if limit <= 0:
            return ()
        forced = self._matcher.compute_ff_tokens()
        self._check()
        return tuple(forced[:limit])

    def allowed_mask(self) -> NDArray[np.int32]:
        """See TokenMatcher."""
        words = self._matcher.compute_bitmask()
        self._check()
        text_mask = self._grammar.text_mask
        return np.frombuffer(words, np.int32, len(text_mask)) & text_mask

    def _is_finished_after(self, token_ids: Sequence[int]) -> bool:
        there = self.copy()
        for token in token_ids:
            there.advance(token)
        return there.is_finished

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = plain_reason(self._matcher.get_error())
            if "too many states" in reason:
                self._grammar.exhaust()
            raise GrammarError(f"structured_output cannot be continued: {reason}")


@dataclass(frozen=True, eq=False)
class ConstrainedDraft:
    """Draft tokens, with the mask of the tokens allowed after the text and after each of them.

    masks: int32 [len(token_ids) + 1, num_words], as in StepRow.grammar_mask. parents: of a tree of
    drafts; None for a chain.
    """

    token_ids: tuple[int, ...]
    masks: NDArray[np.int32]
    parents: tuple[int, ...] | None = None


class OutputConstraint:
    """The grammar of one sequence, advanced by verified tokens only.

    Every method raises GrammarError once the grammar has failed.
    """

    def __init__(
        self,
        grammar: Grammar,
        num_prompt_tokens: int,
        min_tokens: int,
        end_token_ids: Collection[int],
    ) -> None:
        """end_token_ids: masked before `min_tokens`, unless no other token is allowed."""
        self._matcher = grammar.matcher()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_followed = num_prompt_tokens
        self._min_tokens = min_tokens
        self._no_end_mask = ~mask_words(end_token_ids, len(grammar.text_mask) * 32)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Advance to the end of the sequence's `token_ids`, from the last known token."""
        for index in range(self._num_followed, len(token_ids)):
            self._matcher.advance(token_ids[index])
            self._num_followed = index + 1

    def permits(self, token_ids: Sequence[int], following: Sequence[int]) -> bool:
        """Advance to the end of `token_ids`; return whether `following` may stand after them."""
        self.follow(token_ids)
        return self._matcher.num_valid(following) == len(following)

    def extend(self, draft: Sequence[int], limit: int) -> ConstrainedDraft:
        """Return the valid prefix of `draft`, with forced tokens inserted; at most `limit` tokens.

        A forced token that differs from the draft ends the draft; further forced tokens follow.
        """
        tokens: list[int] = []
        there, masks = self._matcher, [self._mask(self._matcher, 0)]
        while len(tokens) < limit and not there.is_finished:
            forced = there.forced_tokens(limit - len(tokens))
            following = forced or draft[len(tokens) : len(tokens) + 1]
            if not following or (not forced and not there.num_valid(following)):
                break
            if tuple(draft[len(tokens) : len(tokens) + len(following)]) != tuple(following):
                draft = ()
            if not tokens:
                there = self._matcher.copy()
            for token in following:
                there.advance(token)
                tokens.append(token)
                masks.append(self._mask(there, len(tokens)))
        return ConstrainedDraft(tuple(tokens), np.stack(masks))

    def along(self, draft: Sequence[int]) -> ConstrainedDraft:
        """Return the whole `draft` with its masks, valid or not.

        For sampled drafts: dropping a token because of its value would change the output
        distribution (Leviathan et al. 2023, appendix A.1, tests every sampled token).
        """
        masks = self._matcher.masks_along(draft)
        for offset in range(len(masks)):
            masks[offset] = self._without_end(masks[offset], offset)
        return ConstrainedDraft(tuple(draft), masks)

    def prune(self, draft: Sequence[int], parents: Sequence[int], limit: int) -> ConstrainedDraft:
        """Return the valid nodes of a tree of drafts, at most MAX_CONSTRAINED_NODES of them.

        Each is matched along its path. Where the grammar forces the next token, or no node is
        valid, there is nothing to choose: the draft is the extended first path of the tree.
        """
        masks = {} if self._matcher.forced_tokens(1) else self._masks_of_nodes(draft, parents)
        nodes = [node for node in masks if node != BASE]
        if not nodes:
            return self.extend([draft[node] for node in first_path(parents)], limit)
        kept = subtree(parents, nodes)
        return ConstrainedDraft(
            tuple(draft[node] for node in nodes),
            np.stack(list(masks.values())),
            None if is_chain(kept) else kept,
        )

    def _masks_of_nodes(
        self, draft: Sequence[int], parents: Sequence[int]
    ) -> dict[int, NDArray[np.int32]]:
        """Return the mask after the text (BASE) and after each valid node of a tree, in order."""
        parents = parents[:MAX_CONSTRAINED_NODES]
        last_children = {parent: node for node, parent in enumerate(parents)}
        places, masks = {BASE: self._matcher}, {BASE: self._mask(self._matcher, 0)}
        for node, path in enumerate(paths(parents)):
            there = places.get(parents[node])
            if there is None or not there.num_valid([draft[node]]):
                continue
            if there is self._matcher or last_children[parents[node]] != node:
                there = there.copy()
            there.advance(draft[node])
            places[node], masks[node] = there, self._mask(there, len(path))
        return masks

    def _mask(self, there: TokenMatcher, offset: int) -> NDArray[np.int32]:
        """Return the allowed tokens of a matcher, `offset` tokens after the last verified one."""
        return self._without_end(there.allowed_mask(), offset)

    def _without_end(self, mask: NDArray[np.int32], offset: int) -> NDArray[np.int32]:
        if self._num_followed - self._num_prompt_tokens + offset >= self._min_tokens:
            return mask
        others = mask & self._no_end_mask
        return others if others.any() else mask
