"""Turns generated tokens into text as they come, and finds where a stop string ends it."""

from __future__ import annotations

import codecs
from typing import Protocol

from specdec.text.tokenizer import Tokenizer

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


class IncrementalDetokenizer:
    """The text of one request, as its tokens come.

    Joined, the results of `take` and `flush` are what `tokenizer.decode` would give, cut before the
    first stop string. That is exact for byte-level tokenizers, whatever the tokens. With
    byte-fallback ones (Llama 2) a character once shown stays, where decoding all at once would take
    it back if broken bytes followed directly, and a run of broken bytes may show a U+FFFD too many
    for every eight of them.

    The first stop string is the one that ends first; of two that end together, the longer. One that
    ends within the first `min_tokens` tokens is passed over, as in vLLM.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`stop`: non-empty strings that end the text; `includes_stop`: and are part of it."""
        self._stop = stop
        self._includes_stop = includes_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        special = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._silent_ids = special | tokenizer.blank_token_ids
        self._vocab_size = tokenizer.vocab_size
        self._decoder = make_text_decoder(tokenizer)
        self._text = ""  # not yet taken
        self._stopped = False

    def append(self, token_id: int) -> str | None:
        """Adds a token; the stop string that the text has now reached, so that it is complete."""
        assert not self._stopped, "the text has ended with a stop string"
        self._num_tokens += 1
        if token_id in self._silent_ids or token_id >= self._vocab_size:
            return None
        return self._extend(self._decoder.add(token_id))

    def take(self) -> str:
        """Returns the text that is certain and was not returned before; it may be empty.

        Held back are unfinished characters and what may be the beginning of a stop string.
        """
        end = len(self._text) if self._stopped else self._certain_chars()
        taken, self._text = self._text[:end], self._text[end:]
        return taken

    def flush(self) -> str:
        """Returns all the rest, an unfinished character as U+FFFD. Nothing may follow."""
        if not self._stopped:
            self._extend(self._decoder.finish())
        self._stopped = True
        taken, self._text = self._text, ""
        return taken

    def _extend(self, new: str) -> str | None:
        known = len(self._text)
        self._text += new
        if not self._stop or not new or self._num_tokens <= self._min_tokens:
            return None
        # What ends in `new` began at most this far before it. None began in text already taken,
        # which was certain.
        starts = (
            (self._text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stop
        )
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        end, start, stop = min(found)
        self._text = self._text[: end if self._includes_stop else start]
        self._stopped = True
        return stop

    def _certain_chars(self) -> int:
        """How much of the text cannot be the beginning of a stop string."""
        end = len(self._text)
        for stop in self._stop:
            start = self._text.find(stop[0], max(0, len(self._text) - len(stop) + 1))
            while 0 <= start < end and not stop.startswith(self._text[start:]):
                start = self._text.find(stop[0], start + 1)
            if 0 <= start < end:
                end = start
        return end
