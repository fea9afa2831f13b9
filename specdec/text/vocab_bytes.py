"""The bytes of the tokens of a vocabulary, independent of how the vocabulary encodes them.

Byte-level vocabularies (GPT-2 and most since) write each byte as one printable character.
SentencePiece vocabularies write a space as U+2581, and byte-fallback tokens as <0x0A>. As bytes,
tokens of both can be compared and concatenated.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from specdec.text.byte_level import bytes_of_token
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import UnsupportedModelError

_CACHED_TOKENS = 1 << 14


class TokenBytes:
    """The bytes that each token adds to a text; those of a special token are its name. Thread-safe.

    Tokens of an unknown kind of vocabulary are decoded one by one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read no vocabulary: each token is read when it is first needed."""
        self._tokenizer = tokenizer
        self._read: Callable[[str], bytes] | None = None
        with suppress(UnsupportedModelError):  # neither byte-level nor SentencePiece-like
            self._read = token_reader(tokenizer.decoder, tokenizer.added_strings)
        self._bytes_of = lru_cache(_CACHED_TOKENS)(self._bytes_of_token)

    def of(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token."""
        return [*map(self._bytes_of, token_ids)]

    def _bytes_of_token(self, token_id: int) -> bytes:
        if self._read is None:
            return self._tokenizer.text_of_token(token_id).encode()
        [token] = self._tokenizer.token_strings((token_id,))
        return self._read(token)


_SPACE_MARK = "\u2581"
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
_BROKEN = re.compile("([\udc80-\udcff]+)")
_ANCHOR = "\n"
_MAX_TOKEN_BYTES = 4  # length of tokens for invalid UTF-8: a character has at most four bytes


class VocabBytes:
    """The tokens of a tokenizer as bytes, and tokenization of text at any place in a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the vocabulary.

        Raises UnsupportedModelError unless it is byte-level or SentencePiece-like.
        """
        self._tokenizer = tokenizer
        raw = json.loads(tokenizer.to_json())
        bytes_of = token_reader(tokenizer.decoder, tokenizer.added_strings)
        self._texts = {i: bytes_of(token) for token, i in tokenizer.vocabulary.items()}
        self.special_ids = tokenizer.special_token_ids
        self.fallback_ids = _fallback_ids(raw)
        self._short_ids = {
            text: token_id
            for text, token_id in self.ids_by_text().items()
            if len(text) <= _MAX_TOKEN_BYTES
        }
        bare = tokenizer.encode("a", add_special_tokens=False)
        if not bare:
            raise UnsupportedModelError('the tokenizer encodes "a" as no tokens')
        full = tokenizer.encode("a")
        self.prefix = tuple(full[: full.index(bare[0])])
        self.adds_space = self.text(bare).startswith(b" ")
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)

    @property
    def ordinary(self) -> dict[int, bytes]:
        """The bytes of the tokens that are text."""
        return {
            token_id: text
            for token_id, text in self._texts.items()
            if text and token_id not in self.special_ids
        }

    def ids_by_text(self) -> dict[bytes, int]:
        """Return the lowest ordinary token of each text; byte-fallback tokens only if no other."""
        ranked = sorted(self.ordinary, key=lambda each: (each not in self.fallback_ids, -each))
        return {self._texts[token_id]: token_id for token_id in ranked}

    def text(self, token_ids: Iterable[int]) -> bytes:
        """Return the concatenated bytes; a special token is its name, an unassigned id is empty."""
        return b"".join(self._texts.get(token_id, b"") for token_id in token_ids)

    def is_text(self, token_id: int) -> bool:
        """Return whether the id is assigned, and not to a special token."""
        return token_id not in self.special_ids and bool(self._texts.get(token_id))

    def length(self, token_id: int) -> int:
        """Return the number of bytes of a token."""
        return len(self._texts.get(token_id, b""))

    def encode_first(self, text: str) -> list[int]:
        """Return the tokens of a text at the beginning of a prompt, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of text that follows other text: no space is added."""
        if not self.adds_space:
            return self.encode_first(text)
        token_ids = self.encode_first(_ANCHOR + text)
        num_anchor = len(self._anchor)
        if token_ids[:num_anchor] == self._anchor:
            return token_ids[num_anchor:]
        return self.encode_first(text)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return tokens of invalid UTF-8, by longest match; bytes without a token are dropped."""
        token_ids, start = [], 0
        while start < len(data):
            text = longest_text(data, start, self._short_ids, _MAX_TOKEN_BYTES)
            if text is not None:
                token_ids.append(self._short_ids[text])
            start += len(text or b" ")
        return token_ids


def longest_text(data: bytes, start: int, texts: Container[bytes], max_bytes: int) -> bytes | None:
    """Return the longest of `texts`, of up to `max_bytes`, that `data` has at `start`, if any."""
    ends = range(min(len(data), start + max_bytes), start, -1)
    return next((data[start:end] for end in ends if data[start:end] in texts), None)


def split_text(data: bytes) -> tuple[list[str | bytes], bytes]:
    """Split bytes into text and invalid UTF-8; also return an incomplete character at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = decoder.decode(data)
    pieces: list[str | bytes] = [
        piece.encode("utf-8", "surrogateescape") if _BROKEN.match(piece) else piece
        for piece in _BROKEN.split(text)
        if piece
    ]
    rest, _ = decoder.getstate()
    return pieces, rest


def token_reader(decoder: Any, added: Collection[str]) -> Callable[[str], bytes]:
    """Return the function from a token's string to its bytes.

    Raises UnsupportedModelError unless the decoder is byte-level or SentencePiece-like.
    """
    decoders = set(_decoder_types(decoder))
    if "ByteLevel" in decoders:
        return bytes_of_token
    if decoders & {"Metaspace", "Replace"}:
        return lambda token: token.encode() if token in added else _sentencepiece_text(token)
    raise UnsupportedModelError(
        "models whose vocabularies differ can draft for each other only if both tokenizers are "
        "byte-level or SentencePiece-like, and one is neither"
    )


def _sentencepiece_text(token: str) -> bytes:
    if match := _FALLBACK.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace(_SPACE_MARK, " ").encode()


def _fallback_ids(raw: Any) -> frozenset[int]:
    if not raw["model"].get("byte_fallback"):
        return frozenset()
    vocabulary = raw["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # a unigram model: (token, score) by token id
        vocabulary = {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
    return frozenset(i for token, i in vocabulary.items() if _FALLBACK.fullmatch(token))


def _decoder_types(decoder: Any) -> Iterator[str]:
    if decoder is None:
        return
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _decoder_types(part)
