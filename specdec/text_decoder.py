"""The text of tokens as they come, in whole characters: one may be spread over several tokens."""

from __future__ import annotations

import codecs
from typing import Protocol

from specdec.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 3  # the most an unfinished character, of at most four bytes, can be spread over
_MAX_OPEN_TOKENS = 8  # longer without a whole character, and the bytes are no UTF-8
_MAX_WINDOW_TOKENS = 4  # beyond it, tokens before the last character boundary are let go


class TextDecoder(Protocol):
    """Decodes one text, token by token. Those that are not to be seen must not be added."""

    def add(self, token_id: int) -> str:
        """What the token adds to the text that is certain by now."""

    def finish(self) -> str:
        """The rest: an unfinished character, as U+FFFD. Nothing may follow."""


def make_text_decoder(tokenizer: Tokenizer) -> TextDecoder:
    """The quickest one that fits the tokenizer."""
    return ByteDecoder(tokenizer) if tokenizer.is_byte_level else WindowDecoder(tokenizer)


class ByteDecoder:
    """For byte-level tokenizers: the bytes of the tokens, one after the other, are UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._rest = b""  # the beginning of a character

    def add(self, token_id: int) -> str:
        """See TextDecoder."""
        data = self._rest + self._bytes_of(token_id)
        text, end = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[end:]
        return text

    def finish(self) -> str:
        """See TextDecoder."""
        return self._rest.decode(errors="replace")


class WindowDecoder:
    """For any tokenizer: the last few tokens are decoded together, each time one is added.

    What that shows beyond what was shown before is new. (tokenizers' own DecodeStream does so too,
    but it holds back bytes that never become a character for ever, at a cost that grows with each,
    and has no end to it: the last half character of a text cannot be asked for.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the tokens that new ones are decoded with
        self._boundary = 0  # tokens of the window up to the last whole character's end
        self._num_shown = 0  # characters of the decoded window that are in the text

    def add(self, token_id: int) -> str:
        """See TextDecoder."""
        self._window.append(token_id)
        text = self._decode()
        end = len(text.rstrip(_REPLACEMENT))
        new = text[self._num_shown : end]
        if end == len(text):
            self._close_at(text)
        elif len(self._window) - self._boundary > _MAX_OPEN_TOKENS:
            # Only the last replacement character can still become another one.
            new = text[self._num_shown : -1]
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._boundary = 0
            self._num_shown = len(self._decode()) - 1
        else:
            self._num_shown = max(self._num_shown, end)
        return new

    def finish(self) -> str:
        """See TextDecoder."""
        return self._decode()[self._num_shown :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _close_at(self, text: str) -> None:
        """Notes that the window, decoded to `text`, ends with a whole character."""
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._window = self._window[self._boundary :]
            text = self._decode()
        self._num_shown = len(text)
        self._boundary = len(self._window)
