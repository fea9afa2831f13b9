"""Which tokens may follow, by a compiled grammar and the tokens so far.

Where a grammar leaves one text only, only that text's usual tokenization is allowed, so it is
forced token by token; where the text is free, any tokens that spell it are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from specdec.text.grammar.translation import plain_reason
from specdec.types.errors import GrammarError
from specdec.types.sampling_params import StructuredOutput

MAX_SHARING = 32
"""So many sequences share one copy of a grammar; then it is compiled again."""

ALL_ALLOWED = np.int32(-1)
"""A word of a mask that forbids nothing."""


def mask_words(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """The mask, int32 [ceil(vocab_size / 32)], in which the bits of `token_ids` alone are set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass
class _Use:
    """What has become of a grammar since it was compiled."""

    num_matchers: int = 0
    is_exhausted: bool = False


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, with the vocabulary it is for. Threads may share it.

    start: a matcher before the first token, which is copied and never moved.
    text_mask: int32 [num_words], every token that may be part of an output, or end it.
    eos_token_ids: those that end it.
    compile_s: processor time that compiling took.
    """

    spec: StructuredOutput
    start: LLMatcher
    text_mask: NDArray[np.int32]
    eos_token_ids: frozenset[int]
    compile_s: float
    _use: _Use = field(default_factory=_Use)

    @property
    def is_used_up(self) -> bool:
        """Whether further sequences are better served by another copy.

        Its matchers share the states of its lexer, of which there are not endlessly many: none of
        them shall find that the others have used them up.
        """
        return self._use.is_exhausted or self._use.num_matchers >= MAX_SHARING

    def matcher(self) -> GrammarMatcher:
        """A matcher for one sequence, before its first token."""
        self._use.num_matchers += 1
        return GrammarMatcher(self)

    def exhaust(self) -> None:
        """Takes note that no further sequence can be served."""
        self._use.is_exhausted = True


class GrammarMatcher:
    """Follows one sequence through a grammar. For one thread at a time.

    Every method raises GrammarError once the grammar has run out of what it may use of time and
    memory (an ambiguous grammar, a regular expression with too many states), and ever after.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.start.deep_copy()
        # llguidance keeps no account of these, and rolls back other tokens in their place.
        self._num_ends_after_stop = 0

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end-of-sequence token may come, or one has come."""
        is_stopped = self._matcher.is_stopped()
        self._check()
        return is_stopped

    def advance(self, token_id: int) -> None:
        """Goes on by a token; raises GrammarError, and stays, if it may not come."""
        if self.is_finished and token_id in self._grammar.eos_token_ids:
            self._num_ends_after_stop += 1
        elif self._matcher.try_consume_tokens([token_id]) != 1:
            self._check()
            raise GrammarError(f"token {token_id} is not what structured_output allows here")

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens."""
        num_ends = min(count, self._num_ends_after_stop)
        self._num_ends_after_stop -= num_ends
        if count > num_ends:
            self._matcher.rollback(count - num_ends)
            self._check()

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids`, from the first on, may come."""
        num_valid: int = self._matcher.validate_tokens(list(token_ids))
        self._check()
        rest = token_ids[num_valid:]
        may_end = rest and rest[0] in self._grammar.eos_token_ids
        if may_end and self._is_finished_after(token_ids[:num_valid]):
            return num_valid + 1  # llguidance does not count an end that must come
        return num_valid

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that must come because nothing else may; perhaps none."""
        if limit <= 0:
            return ()
        forced = self._matcher.compute_ff_tokens()
        self._check()
        return tuple(forced[:limit])

    def allowed_mask(self) -> NDArray[np.int32]:
        """What may come: int32 [num_words], where bit t % 32 of word t // 32 is for token t."""
        words = self._matcher.compute_bitmask()
        self._check()
        text_mask = self._grammar.text_mask
        return np.frombuffer(words, np.int32, len(text_mask)) & text_mask

    def masks_along(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """What may come after none, one, ... and all of `token_ids`, and stays where it is.

        Returns int32 [len(token_ids) + 1, num_words]. After a token that may not come there is
        nothing to decide, so what follows it forbids nothing.
        """
        masks = np.full((len(token_ids) + 1, len(self._grammar.text_mask)), ALL_ALLOWED)
        num_valid = self.num_valid(token_ids)
        for index in range(num_valid + 1):
            masks[index] = self.allowed_mask()
            if index < num_valid:
                self.advance(token_ids[index])
        self.rollback(num_valid)
        return masks

    def _is_finished_after(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            self.advance(token)
        is_finished = self.is_finished
        self.rollback(len(token_ids))
        return is_finished

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = plain_reason(self._matcher.get_error())
            if "too many states" in reason:
                self._grammar.exhaust()
            raise GrammarError(f"structured_output cannot be continued: {reason}")
