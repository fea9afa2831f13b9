"""Grammar of an answer that follows reasoning: any text up to an end mark, then the grammar.

Marks are texts: they are found in the bytes of the tokens, however these divide them, as the parser
of the reasoning finds them in the text. A token that ends a mark and goes on is allowed only if
white space alone follows in it, so that the grammar begins with a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from specdec.text.grammar.matcher import (
    MAX_EARLIER_STATES,
    Grammar,
    GrammarMatcher,
    TokenMatcher,
    mask_words,
)
from specdec.text.grammar.vocabulary import GrammarVocabulary
from specdec.types.errors import GrammarError
from specdec.types.sampling.reasoning_marks import ReasoningMarks

MAX_SPACES = 4
"""Most bytes of white space before an opening mark, and between a closing mark and the answer."""

_SPACE = b" \t\r\n"


class Part(Enum):
    """Part of an output before its answer."""

    START = auto()  # white space and the beginning of a mark, or else the answer
    REASONING = auto()
    GAP = auto()  # white space after the end mark


class Place(NamedTuple):
    """Place before the answer.

    text: the end of the output that decides how it goes on, where white space is spaces: there are
    few places, so that their masks are kept.
    """

    part: Part
    text: bytes = b""


class FreeText:
    """Any text before an answer, for one vocabulary and the marks of reasoning. Thread-safe."""

    def __init__(
        self, vocabulary: GrammarVocabulary, marks: ReasoningMarks, num_words: int
    ) -> None:
        """Find the tokens on which marks depend, in a fraction of a second.

        num_words: of a mask.
        """
        self._openings = tuple(mark.encode() for mark in marks.openings)
        self._closings = tuple(mark.encode() for mark in marks.closings)
        self._marks = self._openings + self._closings
        self._num_words = num_words
        ends = (mark[:end] for mark in self._closings for end in range(len(mark)))
        self._within = {text: Place(Part.REASONING, text) for text in ends}
        self._longest = max(map(len, self._within))
        self._tokens, self._end_ids = vocabulary.tokens, frozenset(vocabulary.eos_token_ids)
        special = set(vocabulary.special_token_ids)
        self._hidden = frozenset(each for each in special if not self._is_in_mark(each))
        self._decisive = [*self._decisive_tokens()]
        self._masks: dict[Place, NDArray[np.int32]] = {}
        for place in (*self._within.values(), Place(Part.START), Place(Part.GAP)):
            self.mask(place)

    def after(self, place: Place, token_id: int) -> Place | None:
        """Return the place after a token; None if the token is not allowed, or is of the answer."""
        if token_id in self._end_ids:
            return None
        is_text = token_id < len(self._tokens) and token_id not in self._hidden
        added = self._tokens[token_id] if is_text else b""
        text = place.text + added
        if place.part is Part.REASONING:
            return self._reasoning(text)
        if not added:
            return None
        return self._start(text) if place.part is Part.START else _gap(text)

    def mask(self, place: Place) -> NDArray[np.int32]:
        """Return the mask of the tokens for which `after` returns a place."""
        known = self._masks.get(place)
        if known is None:
            known = self._masks[place] = self._mask(place)
        return known

    def _mask(self, place: Place) -> NDArray[np.int32]:
        num_bits = self._num_words * 32
        if place.part is not Part.REASONING:
            allowed = (each for each in self._decisive if self.after(place, each) is not None)
            return mask_words(allowed, num_bits)
        refused = (each for each in self._decisive if self.after(place, each) is None)
        return ~mask_words((*refused, *self._end_ids), num_bits)

    def _start(self, text: bytes) -> Place | None:
        rest = text.lstrip(_SPACE)
        if (num_spaces := len(text) - len(rest)) > MAX_SPACES:
            return None
        for mark in self._openings:
            if rest.startswith(mark):
                return self._reasoning(rest[len(mark) :])
        for mark in self._closings:
            if rest.startswith(mark):
                return _gap(rest[len(mark) :])
        may_begin = any(mark.startswith(rest) for mark in self._marks)
        return Place(Part.START, b" " * num_spaces + rest) if may_begin else None

    def _reasoning(self, text: bytes) -> Place | None:
        found = [(start, mark) for mark in self._closings if (start := text.find(mark)) >= 0]
        if found:
            start, mark = min(found)
            return _gap(text[start + len(mark) :])
        for length in range(min(len(text), self._longest), 0, -1):
            if (place := self._within.get(text[-length:])) is not None:
                return place
        return self._within[b""]

    def _is_in_mark(self, token_id: int) -> bool:
        name = self._tokens[token_id]
        return bool(name) and any(name in mark for mark in self._marks)

    def _decisive_tokens(self) -> Iterator[int]:
        """Yield the tokens that may not continue reasoning, or may come before or after it."""
        parts = b"\xff".join(self._marks)  # a byte that no text has
        first_bytes, shortest = frozenset(parts + _SPACE), min(map(len, self._marks))
        ends = tuple({mark[start:] for mark in self._marks for start in range(len(mark))})
        for token_id, text in enumerate(self._tokens):
            if not text or token_id in self._hidden:
                continue
            is_part = text[0] in first_bytes and (
                text.startswith(ends) or text.strip(_SPACE) in parts
            )
            if is_part or (len(text) > shortest and any(mark in text for mark in self._marks)):
                yield token_id


def _gap(text: bytes) -> Place | None:
    is_space = len(text) <= MAX_SPACES and not text.strip(_SPACE)
    return Place(Part.GAP, b" " * len(text)) if is_space else None


@dataclass(frozen=True, eq=False)
class ReasoningGrammar(Grammar):
    """Grammar of the answer, with the free text before it.

    begins_inside: whether an output begins within the free text.
    """

    reasoning: FreeText = field(kw_only=True)
    begins_inside: bool = field(kw_only=True)

    def matcher(self) -> ReasoningMatcher:
        """See Grammar."""
        return ReasoningMatcher(self)


class _Before(NamedTuple):
    """State before the answer.

    answer: matcher of what may be the answer already, which is never advanced; None if there can be
    none before a mark. token_ids: of this answer.
    """

    place: Place
    answer: GrammarMatcher | None
    token_ids: tuple[int, ...] = ()

    def permits_answer(self, token_id: int) -> bool:
        """Return whether the answer may begin, or go on, with a token."""
        return self.answer is not None and self.answer.num_valid((token_id,)) == 1


class ReasoningMatcher(TokenMatcher):
    """State of one sequence in the reasoning before its answer, or in the grammar of the answer.

    White space after the end mark is of the answer where its grammar permits it.
    """

    def __init__(self, grammar: ReasoningGrammar) -> None:
        self._grammar = grammar
        before = _Before(Place(Part.START), GrammarMatcher(grammar))
        if grammar.begins_inside:
            before = _Before(Place(Part.REASONING), None)
        self._before: _Before | None = before  # None in the answer
        self._answer: GrammarMatcher | None = None
        self._num_answered = 0  # tokens after the one that began the answer
        self._earlier: deque[_Before] | None = deque(maxlen=MAX_EARLIER_STATES)

    @property
    def is_finished(self) -> bool:
        """See TokenMatcher."""
        return self._answer is not None and self._answer.is_finished

    def advance(self, token_id: int) -> None:
        """See TokenMatcher."""
        if self._answer is not None:
            self._answer.advance(token_id)
            self._num_answered += 1
            return
        before = self._before
        assert before is not None
        following = self._following(before, token_id)
        if following is None:
            if not before.permits_answer(token_id):
                raise GrammarError(f"token {token_id} is not allowed by structured_output")
            self._begin_answer((*before.token_ids, token_id))
        self._before = following
        if self._earlier is not None:
            self._earlier.append(before)

    def copy(self) -> Self:
        """See TokenMatcher."""
        there = copy(self)
        there._earlier = None
        if self._answer is not None:
            there._answer = self._answer.copy()
        return there

    def rollback(self, count: int) -> None:
        """See TokenMatcher."""
        num_answered = min(count, self._num_answered)
        if self._answer is not None and num_answered:
            self._answer.rollback(num_answered)
            self._num_answered -= num_answered
        if count == num_answered:
            return
        assert self._earlier is not None, "a copy is rolled back"
        if count - num_answered > len(self._earlier):
            raise GrammarError(f"structured_output cannot be undone by {count} tokens")
        for _ in range(count - num_answered):
            self._before = self._earlier.pop()
        self._answer = None

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """See TokenMatcher."""
        if self._answer is not None:
            return self._answer.num_valid(token_ids)
        there = self.copy()
        for index, token_id in enumerate(token_ids):
            if there._answer is not None:
                return index + there._answer.num_valid(token_ids[index:])
            if not there._permits(token_id):
                return index
            there.advance(token_id)
        return len(token_ids)

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        """See TokenMatcher."""
        return () if self._answer is None else self._answer.forced_tokens(limit)

    def allowed_mask(self) -> NDArray[np.int32]:
        """See TokenMatcher."""
        if self._answer is not None:
            return self._answer.allowed_mask()
        assert self._before is not None
        place, answer, _ = self._before
        mask = self._grammar.reasoning.mask(place)
        return mask if answer is None else mask | answer.allowed_mask()

    def _permits(self, token_id: int) -> bool:
        assert self._before is not None
        place = self._grammar.reasoning.after(self._before.place, token_id)
        return place is not None or self._before.permits_answer(token_id)

    def _following(self, before: _Before, token_id: int) -> _Before | None:
        """Return the state before the answer after a token; None if the token must be of it."""
        place = self._grammar.reasoning.after(before.place, token_id)
        if place is None or place.part is Part.REASONING:
            return None if place is None else _Before(place, None)
        if place.part is Part.START:
            return self._undecided(before, place, token_id)
        if before.place.part is not Part.GAP:
            return _Before(place, GrammarMatcher(self._grammar))
        return None if before.permits_answer(token_id) else before._replace(place=place)

    def _undecided(self, before: _Before, place: Place, token_id: int) -> _Before:
        """Return the state after a token that may begin a mark, and perhaps the answer as well."""
        if before.answer is None or not before.permits_answer(token_id):
            return _Before(place, None)
        answer = before.answer.copy()
        answer.advance(token_id)
        return _Before(place, answer, (*before.token_ids, token_id))

    def _begin_answer(self, token_ids: Collection[int]) -> None:
        """Make the matcher of the answer, which can be rolled back, after its first tokens."""
        self._answer, self._num_answered = GrammarMatcher(self._grammar), 0
        for token_id in token_ids:
            self._answer.advance(token_id)
