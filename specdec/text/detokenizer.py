"""Incremental detokenization with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from specdec.text.marked_stops import MarkedStops, StopMatch
from specdec.text.tokenizer import Tokenizer
from specdec.types.sampling.sampling_params import SamplingParams

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 3  # maximum number of tokens of an incomplete character (at most four bytes)
_MAX_OPEN_TOKENS = 8  # after this many without a complete character the bytes are not UTF-8
_MAX_WINDOW_TOKENS = 4  # beyond this, tokens before the last character boundary are dropped
_MAX_TOKENS_BEFORE = 8  # of the text before: two characters whose bytes are tokens


class TextDecoder(Protocol):
    """Decoder of one text, token by token. Invisible tokens must not be added."""

    def add(self, token_id: int) -> str:
        """Add a token; return the text that is now final and was not returned before."""

    def finish(self) -> str:
        """Return the rest: an incomplete character as U+FFFD. No token may follow."""


class ByteDecoder:
    """Decoder for byte-level tokenizers: the concatenated bytes of the tokens are UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = tokenizer.whole_texts
        self._bytes_of = tokenizer.token_bytes
        self._rest = b""  # an incomplete character

    def add(self, token_id: int) -> str:
        """See TextDecoder."""
        if not self._rest and (whole := self._texts[token_id]) is not None:
            return whole
        data = self._rest + self._bytes_of(token_id)
        text, end = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[end:] if end < len(data) else b""
        return text

    def finish(self) -> str:
        """See TextDecoder."""
        return self._rest.decode(errors="replace")


class WindowDecoder:
    """Decoder for any tokenizer: decodes a window of the last tokens whenever one is added.

    Characters beyond those already returned are new. (DecodeStream of tokenizers works like this,
    but it holds back bytes that never become a character indefinitely, with a growing cost, and it
    cannot flush: the incomplete last character of a text is lost.)

    before: visible tokens that the text continues. A SentencePiece decoder drops the space at the
    beginning of a text, and must keep that of a continuation.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the tokens that new ones are decoded with
        self._boundary = 0  # tokens of the window up to the end of the last complete character
        self._num_shown = 0  # characters of the decoded window that were returned
        self._rest = ""  # the characters of it after them
        self._continue(before)

    def add(self, token_id: int) -> str:
        """See TextDecoder."""
        self._rest = ""
        self._window.append(token_id)
        text = self._decode()
        end = len(text.rstrip(_REPLACEMENT))
        new = text[self._num_shown : end]
        if end == len(text):
            self._close_at(text)
        elif len(self._window) - self._boundary > _MAX_OPEN_TOKENS:
            # Only the last replacement character can still become another character.
            new = text[self._num_shown : -1]
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._boundary = 0
            text = self._decode()
            self._num_shown = len(text) - 1
            self._rest = text[self._num_shown :]
        else:
            self._num_shown = max(self._num_shown, end)
            self._rest = text[self._num_shown :]
        return new

    def finish(self) -> str:
        """See TextDecoder."""
        return self._rest

    def _continue(self, before: Sequence[int]) -> None:
        """Open the window with the shortest end of `before` that is complete characters."""
        for start in range(len(before) - 1, -1, -1):
            text = self._tokenizer.decode(before[start:], skip_special_tokens=False)
            if _REPLACEMENT not in text and (text or start == 0):
                self._window = list(before[start:])
                self._boundary, self._num_shown = len(self._window), len(text)
                return

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _close_at(self, text: str) -> None:
        """Record that the window, decoded to `text`, ends with a complete character."""
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._window = self._window[self._boundary :]
            text = self._decode()
        self._num_shown = len(text)
        self._boundary = len(self._window)


class IncrementalDetokenizer:
    """The text of one request, decoded incrementally.

    The concatenated results of `take` and `flush` equal `tokenizer.decode`, cut before the first
    stop string; after a prompt, they equal what the tokens add to its text. This is exact for
    byte-level tokenizers. With byte fallback (Llama 2) a character that was returned stays, where
    decoding all tokens at once would replace it if invalid bytes follow directly, and a run of
    invalid bytes may have an extra U+FFFD for every eight of them.

    The first stop string is the one that ends first; of two that end together, the longer one. A
    stop string that ends within the first `min_tokens` tokens is ignored, as in vLLM. A stop string
    may name special tokens that are left out of the text.

    lengths: characters of the latest `take` or `flush` that became final with each of the tokens
    since the one before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        """stop: non-empty strings that end the text. includes_stop: whether they are part of it.

        before: the prompt. A text after a hidden token, such as the start of a turn, is a new one.
        """
        self._stop, self.has_stop_strings = stop, bool(stop)
        self._includes_stop = includes_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._hidden_ids = (
            tokenizer.hidden_token_ids if skip_special_tokens else tokenizer.blank_token_ids
        )
        self._vocab_size = tokenizer.vocab_size
        self._marks = MarkedStops.of(tokenizer, stop) if skip_special_tokens else None
        self._held = [(each, len(each) - 1) for each in stop]  # and the most characters held back
        if self._marks is not None:  # the whole visible text may be followed by a special token
            self._held += [(each, len(each)) for each in self._marks.visible]
        self._decoder: TextDecoder
        if tokenizer.is_byte_level:
            self._decoder = ByteDecoder(tokenizer)
        else:
            self._decoder = WindowDecoder(tokenizer, self._visible_end(before))
        self._text = ""  # not returned yet
        self._ends: list[int] = []  # end of the final part after each token since the last take
        self._stopped = False
        self.lengths: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int]
    ) -> IncrementalDetokenizer:
        """Return the detokenizer of a request with these parameters."""
        return cls(
            tokenizer,
            params.stop,
            params.skip_special_tokens,
            includes_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            before=prompt,
        )

    def append(self, token_id: int) -> str | None:
        """Add a token; return the stop string that ends the text with it, if any."""
        assert not self._stopped, "the text has ended with a stop string"
        self._num_tokens += 1
        stop = None
        if token_id < self._vocab_size and token_id not in self._hidden_ids:
            new = self._decoder.add(token_id)
            if self._stop:
                stop = self._extend(new)
            else:
                self._text += new
        elif self._marks is not None:
            stop = self._end_at(self._marked(token_id))
        self._ends.append(self._final_end())
        return stop

    def append_until_stop(self, token_ids: Sequence[int]) -> None:
        """Add tokens, up to the one that ends a stop string."""
        for token_id in token_ids:
            if self.append(token_id) is not None:
                return

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens of a text that no stop string ends, since there are none."""
        assert not self._stop, "a stop string may end the text"
        hidden_ids, vocab_size, ends = self._hidden_ids, self._vocab_size, self._ends
        add, text = self._decoder.add, self._text
        for token_id in token_ids:
            if token_id < vocab_size and token_id not in hidden_ids:
                text += add(token_id)
            ends.append(len(text))
        self._text = text
        self._num_tokens += len(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Add tokens of a text without stop strings, and return what `take` then returns."""
        if len(token_ids) != 1 or self._ends:
            self.extend(token_ids)
            return self.take()
        token_id = token_ids[0]
        is_visible = token_id < self._vocab_size and token_id not in self._hidden_ids
        text = self._decoder.add(token_id) if is_visible else ""
        self.lengths = (len(text),)
        return text

    def skip(self) -> None:
        """Add a token that is not part of the text: the one that ends it."""
        self._ends.append(self._final_end())

    def take(self) -> str:
        """Return the text that is final and was not returned before; it may be empty.

        Incomplete characters and a possible start of a stop string are held back.
        """
        return self._take(self._ends[-1] if self._ends else self._final_end())

    def flush(self) -> str:
        """Return the rest, with an incomplete character as U+FFFD. No token may follow."""
        if not self._stopped:
            self._extend(self._decoder.finish())
        self._stopped = True
        return self._take(len(self._text))

    def _is_hidden(self, token_id: int) -> bool:
        return token_id in self._hidden_ids or token_id >= self._vocab_size

    def _visible_end(self, token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens after the last hidden one."""
        end = reversed(token_ids[-_MAX_TOKENS_BEFORE:])
        return [*takewhile(lambda each: not self._is_hidden(each), end)][::-1]

    def _take(self, end: int) -> str:
        """Return the text up to `end`, and set `lengths`."""
        taken, self._text = self._text[:end], self._text[end:]
        lengths, start = [], 0
        for each in self._ends:
            stop = end if each > end else each
            lengths.append(stop - start if stop > start else 0)
            start += lengths[-1]
        if lengths:
            lengths[-1] += end - start  # an incomplete character
        self._ends.clear()
        self.lengths = tuple(lengths)
        return taken

    def _extend(self, new: str) -> str | None:
        known = len(self._text)
        self._text += new
        if not self._stop or not new:
            return None
        marked = () if self._marks is None else self._marks.find_in_text(new, len(self._text))
        if self._num_tokens <= self._min_tokens:
            return None
        # A stop string that ends in `new` starts at most this far before it, and never in text
        # that was returned.
        starts = (
            (self._text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stop
        )
        found = [StopMatch(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return self._end_at([*found, *marked])

    def _marked(self, token_id: int) -> Sequence[StopMatch]:
        """Return the stop strings that a token outside the text completes."""
        assert self._marks is not None, "no stop string names a special token"
        found = self._marks.find_at_token(token_id, len(self._text))
        return found if self._num_tokens > self._min_tokens else ()

    def _end_at(self, found: Sequence[StopMatch]) -> str | None:
        """Cut the text at the first match, if any, and return its stop string."""
        if not found:
            return None
        first = min(found, key=lambda each: (each.end, -len(each.stop)))
        self._text = self._text[: first.end if self._includes_stop else max(0, first.start)]
        self._stopped = True
        return first.stop

    def _final_end(self) -> int:
        """Return the length of the text before a possible start of a stop string."""
        end = len(self._text)
        if self._stopped:
            return end
        for stop, most in self._held:
            start = self._text.find(stop[0], max(0, len(self._text) - most))
            while 0 <= start < end and not stop.startswith(self._text[start:]):
                start = self._text.find(stop[0], start + 1)
            if 0 <= start < end:
                end = start
        return end
