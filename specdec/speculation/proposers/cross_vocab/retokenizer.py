"""Incremental retokenization: a growing text in the tokens of a draft model's tokenizer.

The tokens at a text's end depend on the text that follows, so each time the text grows its last
tokens are encoded again, together with the new text. Tokens further back stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from specdec.text.vocab_bytes import VocabBytes, split_text

_MAX_WINDOW_TOKENS = 24
_MIN_WINDOW_TOKENS = 12
_CONTEXT_TOKENS = 2  # first tokens of a window, encoded without their left context


class Retokenizer:
    """The text so far in the draft model's tokens.

    token_ids: decode to the text, unless the tokenizer normalizes text or lacks some bytes.
    num_kept: number of leading tokens that the last `extend` did not change.
    """

    def __init__(self, spelling: VocabBytes) -> None:
        self._spelling = spelling
        self.token_ids = list(spelling.prefix)
        self.num_kept = len(self.token_ids)
        self._num_whole = len(self.token_ids)  # tokens of whole characters
        self._rest = b""  # perhaps the beginning of a character
        # The last tokens are encoded again; the first of them are context for the others only.
        self._window_start = len(self.token_ids)
        self._num_context = 0

    @property
    def num_settled(self) -> int:
        """Number of leading tokens that will never change."""
        return self._window_start + self._num_context

    def extend(self, data: bytes) -> None:
        """Append text, which may begin and end within a character."""
        num_settled, old = self.num_settled, self.token_ids[self.num_settled :]
        del self.token_ids[self._num_whole :]
        pieces, self._rest = split_text(self._rest + data)
        for piece in pieces:
            if isinstance(piece, str):
                self._add_text(piece)
            else:
                self._add_broken(piece)
        self._num_whole = len(self.token_ids)
        self.token_ids += self._spelling.encode_bytes(self._rest)
        self.num_kept = num_settled + num_equal(old, self.token_ids[num_settled:])

    def _add_text(self, text: str) -> None:
        start, known = self._window_start, self.token_ids[self._window_start :]
        before = self._spelling.text(known).decode(errors="replace")
        if start > len(self._spelling.prefix):
            encoded = self._spelling.encode_inside(before + text)
        else:
            before = before.removeprefix(" ") if self._spelling.adds_space else before
            encoded = self._spelling.encode_first(before + text)
        num_known, num_encoded = self._alignment(known, encoded, (before + text).encode())
        if num_encoded is None:
            num_known, num_encoded, encoded = len(known), 0, self._spelling.encode_inside(text)
        self.token_ids[start + num_known :] = encoded[num_encoded:]
        self._advance_window()

    def _add_broken(self, data: bytes) -> None:
        """Append bytes that are invalid UTF-8; the text after them is encoded without them."""
        self.token_ids += self._spelling.encode_bytes(data)
        self._window_start, self._num_context = len(self.token_ids), 0

    def _alignment(
        self, known: Sequence[int], encoded: Sequence[int], text: bytes
    ) -> tuple[int, int | None]:
        """Return how many tokens to keep of `known`, and how many to skip of `encoded`.

        They meet at the first place after the context where both have a token boundary. The second
        number is None without one, for example if the tokenizer normalizes the text.
        """
        if self._num_context == 0:
            return 0, 0
        ends = list(accumulate(map(self._spelling.length, encoded), initial=0))
        if not self._spelling.text(encoded).endswith(text):
            return 0, None
        surplus = ends[-1] - len(text)  # a space that the tokenizer prepends
        places = {end - surplus: index for index, end in enumerate(ends)}
        known_ends = list(accumulate(map(self._spelling.length, known), initial=0))
        for num_known in range(self._num_context, len(known_ends)):
            if known_ends[num_known] in places:
                return num_known, places[known_ends[num_known]]
        return 0, None

    def _advance_window(self) -> None:
        """Move a window that has become long to the beginning of a word, or else of a character."""
        if len(self.token_ids) - self._window_start <= _MAX_WINDOW_TOKENS:
            return
        latest, earliest = len(self.token_ids) - _MIN_WINDOW_TOKENS, self._window_start + 1
        starts = range(latest, max(earliest, len(self.token_ids) - _MAX_WINDOW_TOKENS) - 1, -1)
        words = (start for start in starts if self._first_byte(start) in b" \n")
        characters = (start for start in starts if self._first_byte(start) & 0xC0 != 0x80)
        start = next(words, next(characters, None))
        if start is not None:
            self._window_start, self._num_context = start, _CONTEXT_TOKENS

    def _first_byte(self, index: int) -> int:
        text = self._spelling.text([self.token_ids[index]])
        return text[0] if text else 0x80


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
