"""Tokenizers that tests of engines share: loading one takes 3 ms of CPU time."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from specdec.text.tokenizer import Tokenizer


def tokenizer_of(directory: Path) -> Tokenizer:
    """Return the tokenizer of a model, which is loaded once as long as its file stays the same."""
    return _loaded(directory, (directory / "tokenizer.json").stat().st_mtime_ns)


@cache
def _loaded(directory: Path, _modified_at_ns: int) -> Tokenizer:
    return Tokenizer(directory)
