"""The bytes of single tokens, for whoever shows tokens one by one."""

from __future__ import annotations

from collections.abc import Sequence as Many

from specdec.errors import UnsupportedModelError
from specdec.spelling import Spelling
from specdec.tokenizer import Tokenizer


class TokenBytes:
    """What each token adds to a text. A special token is its name. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Reads the whole vocabulary, which takes a fraction of a second."""
        self._tokenizer = tokenizer
        try:
            self._spelling: Spelling | None = Spelling(tokenizer)
        except UnsupportedModelError:  # neither byte-level nor SentencePiece-like
            self._spelling = None

    def of(self, token_ids: Many[int]) -> list[bytes]:
        """One for one. Where the vocabulary is of an unknown kind, the token decoded alone."""
        if self._spelling is None:
            return [self._tokenizer.decode([each], False).encode() for each in token_ids]
        return [self._spelling.text((each,)) for each in token_ids]
