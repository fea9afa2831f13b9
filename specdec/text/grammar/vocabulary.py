"""The vocabulary in which llguidance reads grammars: the bytes and the tokenization of texts."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer as Backend

from specdec.text.tokenizer import Tokenizer
from specdec.text.vocab_bytes import longest_text, token_reader
from specdec.types.errors import UnsupportedModelError


@dataclass(frozen=True)
class GrammarVocabulary:
    """Data of an LLTokenizer, which can be sent to another process as JSON.

    llguidance's own reader of tokenizer.json takes every added token in angle brackets for a
    special one, such as `<tool_call>` of Qwen, and writes the names of special tokens that occur in
    a text as these tokens. Both allow tokens that its grammars then reject.

    tokenizer_json: the tokenizer in the format of tokenizer.json. texts: the bytes of each token as
    Latin-1, by id; empty if no text may contain it. special_token_ids: also empty in a text.
    """

    tokenizer_json: str
    texts: tuple[str, ...]
    special_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> GrammarVocabulary:
        """Read a tokenizer. vocab_size: the model's, which may be padded beyond the tokenizer's.

        Raises UnsupportedModelError unless it is byte-level or SentencePiece-like, with an end
        token.
        """
        eos = tuple(sorted(eos_token_ids))
        if not eos:
            raise UnsupportedModelError("the tokenizer is not supported: no token ends a text")
        try:
            bytes_of = token_reader(tokenizer.decoder, tokenizer.added_strings)
        except UnsupportedModelError as error:
            reason = "the tokenizer is not supported: neither byte-level nor SentencePiece-like"
            raise UnsupportedModelError(reason) from error
        texts = [""] * vocab_size
        for token, token_id in tokenizer.vocabulary.items():
            if token_id < vocab_size:
                texts[token_id] = bytes_of(token).decode("latin-1")
        special = sorted(each for each in tokenizer.special_token_ids if each < vocab_size)
        return cls(tokenizer.to_json(), tuple(texts), tuple({*special, *eos}), eos)

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each token, those of a special token its name."""
        return [text.encode("latin-1") for text in self.texts]

    def to_json(self) -> str:
        """Return its fields as an object of JSON."""
        return json.dumps(asdict(self))

    def tokenizer(self) -> LLTokenizer:
        """Make the tokenizer of llguidance."""
        wrapper = TokenizerWrapper(_TextTokenizer(self))
        return LLTokenizer(wrapper, eos_token=list(self.eos_token_ids))


class _TextTokenizer:
    """A tokenizer with the attributes that TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = list(vocabulary.special_token_ids)
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self._backend = Backend.from_str(vocabulary.tokenizer_json)
        names = map(self._backend.id_to_token, self.special_token_ids)
        self._backend.add_special_tokens([name for name in names if name])  # ends that are not yet
        self._backend.encode_special_tokens = True
        _add_no_space(self._backend)
        special = frozenset(self.special_token_ids)
        texts = enumerate(self.tokens)
        self._texts = {each: text for each, text in texts if text and each not in special}
        self._ids = {text: token_id for token_id, text in self._texts.items()}
        self._longest = max(map(len, self._ids), default=0)  # in bytes

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text inside another one; names of special tokens are text.

        Tokens by longest match where the tokenizer's own spell another text: it may normalize text,
        strip spaces, or, as unigram models do, know special tokens by their names.
        """
        content = text.encode()
        try:
            token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except Exception:  # a character without a token
            token_ids = []
        if b"".join(self._texts.get(each, b"") for each in token_ids) == content:
            return token_ids
        return self._longest_matches(content)

    def _longest_matches(self, content: bytes) -> list[int]:
        """Return tokens up to the first byte that none begins with."""
        token_ids, start = [], 0
        while text := longest_text(content, start, self._ids, self._longest):
            token_ids.append(self._ids[text])
            start += len(text)
        return token_ids


def _add_no_space(backend: Backend) -> None:
    """Let a tokenizer add no space before a text, as SentencePiece-like ones do."""
    parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    states = {
        name: _without_space(json.loads(part.__getstate__()))
        for name, part in parts.items()
        if part is not None
    }
    model = {"type": "BPE", "vocab": {}, "merges": []}
    bare = Backend.from_str(json.dumps({"added_tokens": [], "model": model, **states}))
    backend.normalizer, backend.pre_tokenizer = bare.normalizer, bare.pre_tokenizer


def _without_space(part: dict[str, Any]) -> dict[str, Any]:
    """Return a normalizer or pre-tokenizer, in the format of tokenizer.json, that adds no space."""
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            inner = [_without_space(each) for each in part[name]]
            return {**part, name: inner}
    if part["type"] == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    return part
