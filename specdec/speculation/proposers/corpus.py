"""Static corpus of suffix decoding: texts of an operator that are looked up beside outputs.

Documentation, templates or source files that answers often quote. Unlike earlier outputs they are
there from the start and never evicted.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.speculation.proposers.suffix_tree import SuffixTree
from specdec.types.errors import InvalidValueError

MAX_CORPUS_TOKENS = 2**19
"""Most tokens of a corpus, some 2 MB of text, whose trees take 5 seconds and at most 180 MB."""

_FIELD = "speculative_config.lookup_corpus"

Encode = Callable[[str], Sequence[int]]


class CorpusText(NamedTuple):
    """A text of the corpus. tenant: the cache_salt of requests that it is for; empty for all."""

    text: str
    tenant: str


class CorpusTrees:
    """Suffix trees of the corpus: one for every request, and one for each tenant's requests."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._trees: dict[str, SuffixTree] = {}
        self.num_tokens = 0

    def load(self, path: str, encode: Encode) -> None:
        """Read a file and build its trees, which takes seconds. Raises InvalidValueError.

        encode: returns the tokens of a text, without special tokens.
        """
        for each in read_corpus(path):
            self._add(each.tenant, encode(each.text), path)

    def trees(self, tenant: str) -> Iterator[SuffixTree]:
        """Return the trees to look up for a request with this cache_salt."""
        for name in dict.fromkeys((tenant, "")):
            if name in self._trees:
                yield self._trees[name]

    def _add(self, tenant: str, token_ids: Sequence[int], path: str) -> None:
        self.num_tokens += len(token_ids)
        if self.num_tokens > MAX_CORPUS_TOKENS:
            limit = f"a file with texts of at most {MAX_CORPUS_TOKENS} tokens in all"
            raise InvalidValueError(_FIELD, path, limit)
        tree = self._trees.setdefault(tenant, SuffixTree(self._max_depth))
        tokens = array("i", token_ids)
        for start in range(len(tokens)):
            tree.add(tokens, start)


def read_corpus(path: str) -> Iterator[CorpusText]:
    """Yield the texts of a file of JSON lines: {"text": ..., "cache_salt": ...}, the salt optional.

    Raises InvalidValueError, which names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        limit = f"a readable file of JSON lines on every node ({error})"
        raise InvalidValueError(_FIELD, path, limit) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _read_line(f"{_FIELD} line {number}", line)


def _read_line(field: str, line: str) -> CorpusText:
    limit = 'a JSON object such as {"text": "...", "cache_salt": "..."}'
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(field, line, limit) from error
    text = content.get("text") if isinstance(content, dict) else None
    salt = content.get("cache_salt", "") if isinstance(content, dict) else None
    is_known = isinstance(content, dict) and content.keys() <= {"text", "cache_salt"}
    if not (is_known and isinstance(text, str) and isinstance(salt, str)):
        raise InvalidValueError(field, line, limit)
    return CorpusText(text, salt)
