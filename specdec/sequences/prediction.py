"""Predicted outputs: a text that a request expects its output to resemble, as a source of drafts.

An edited file repeats most of the original. The cursor follows the output along the predicted
tokens and drafts what comes next there. Where the output leaves the prediction, the cursor looks
for the output's last tokens in it, nearest to the place where it was lost. As with any draft, the
verifier decides which tokens become output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

METHOD = "prediction"
"""The drafting method under which these drafts are counted."""

MAX_DRAFT_TOKENS = 16
"""Longest draft. A longer one adds little: 16 accepted tokens have 17 for the price of a step."""

_FIRST_DRAFT_TOKENS = 8
_MIN_DRAFT_TOKENS = 2
_MIN_MATCH = 2
"""Least number of last output tokens by which a lost place is found again."""
_LONG_MATCH = 4
_MATCH_LENGTHS = (_MIN_MATCH, 3, _LONG_MATCH, 8)

_KEY_FACTOR = 0x9E3779B97F4A7C15
_KEY_MASK = 2**64 - 1


class _NgramPlaces:
    """Places after the n-grams of one length, by the n-gram; a lookup is a binary search.

    An n-gram is found by a 64-bit key. Equal keys of different n-grams would only make a wrong
    draft.
    """

    def __init__(self, token_ids: NDArray[np.uint64], length: int) -> None:
        num_ngrams = max(0, len(token_ids) - length + 1)
        keys = np.zeros(num_ngrams, np.uint64)
        for offset in range(length):
            keys = keys * np.uint64(_KEY_FACTOR) + token_ids[offset : offset + num_ngrams]
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._places = (order + length).astype(np.int32)  # ascending where keys are equal

    def nearest(self, ngram: Sequence[int], place: int) -> int | None:
        """Return the first place after an n-gram that is not before `place`, else the last one."""
        key = _key(ngram)
        start, end = self._keys.searchsorted(key), self._keys.searchsorted(key, "right")
        if start == end:
            return None
        places = self._places[start:end]
        ahead = int(places.searchsorted(np.int32(place)))
        return int(places[min(ahead, len(places) - 1)])


def _key(ngram: Sequence[int]) -> np.uint64:
    key = 0
    for token in ngram:
        key = (key * _KEY_FACTOR + token) & _KEY_MASK
    return np.uint64(key)


class PredictedText:
    """The tokens of a prediction with an index of their n-grams; the choices of a request share it.

    Making one sorts the n-grams, which takes up to tens of milliseconds without the interpreter
    lock: not for the engine's thread.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids: NDArray[np.int32] = np.asarray(token_ids, np.int32)
        before_last = self.token_ids[:-1].astype(np.uint64)  # nothing follows the last token
        self._ngrams = [(length, _NgramPlaces(before_last, length)) for length in _MATCH_LENGTHS]

    def __len__(self) -> int:
        return len(self.token_ids)

    def find(self, text: Sequence[int], least: int, place: int) -> int | None:
        """Return the place after the longest match of a text's end, at least `least` tokens.

        Lengths in _MATCH_LENGTHS are tried. Of several matches the next one from `place` on, else
        the last one before it.
        """
        found = None
        for length, ngrams in self._ngrams:
            nearest = ngrams.nearest(text[-length:], place) if length <= len(text) else None
            if nearest is None:
                break
            if length >= least:
                found = nearest
        return found


class PredictionCursor:
    """The place of one output in a predicted text."""

    def __init__(self, predicted: PredictedText, num_prompt_tokens: int) -> None:
        """num_prompt_tokens: where the output begins in its text."""
        self._predicted = predicted
        self._num_prompt_tokens = num_prompt_tokens
        self._num_read = num_prompt_tokens  # tokens of the text
        self._place: int | None = 0  # of the next token; None where it is lost
        self._lost_at = 0
        self._is_guess = False  # whether no token has confirmed the place yet
        self._num_draft_tokens = _FIRST_DRAFT_TOKENS

    def has_place(self, text: Sequence[int]) -> bool:
        """Return whether the prediction goes on after the end of `text`, as for `draft`."""
        self._follow(text)
        return self._place is not None and self._place < len(self._predicted)

    def draft(self, text: Sequence[int], most: int = MAX_DRAFT_TOKENS) -> tuple[int, ...]:
        """Return what the prediction has after the end of `text`, at most `most` tokens.

        text: prompt and output; that of an earlier call is its beginning.
        """
        self._follow(text)
        if self._place is None:
            return ()
        count = min(most, self._num_draft_tokens)
        return tuple(self._predicted.token_ids[self._place : self._place + count].tolist())

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Adapt the length of the next draft to a verified one."""
        if num_accepted < num_drafted:
            self._num_draft_tokens = max(_MIN_DRAFT_TOKENS, self._num_draft_tokens // 2)
        elif num_drafted >= self._num_draft_tokens:
            self._num_draft_tokens = min(MAX_DRAFT_TOKENS, 2 * self._num_draft_tokens)

    def _follow(self, text: Sequence[int]) -> None:
        """Move along the new tokens of a text, and look for the place where they go on."""
        new = text[self._num_read :]
        if not new:
            return
        predicted = self._predicted.token_ids
        self._num_read = len(text)
        was_lost = self._place is None
        for token in new:
            if self._place is None:
                break
            if self._place < len(predicted) and predicted[self._place] == token:
                self._place, self._is_guess = self._place + 1, False
            else:
                was_lost = was_lost or self._is_guess
                self._lost_at, self._place = self._place, None
        if self._place is None:
            self._place = self._found(text, was_lost=was_lost)

    def _found(self, text: Sequence[int], *, was_lost: bool) -> int | None:
        """Return where the output goes on in the prediction; None where that is not known.

        At first it is taken to have replaced one token, unless a long match is found: a short match
        is often elsewhere.
        """
        end = text[max(self._num_prompt_tokens, len(text) - _MATCH_LENGTHS[-1]) :]
        least = _MIN_MATCH if was_lost else _LONG_MATCH
        place = self._predicted.find(end, least, self._lost_at)
        self._is_guess = place is None and not was_lost and self._lost_at + 1 < len(self._predicted)
        return self._lost_at + 1 if self._is_guess else place
