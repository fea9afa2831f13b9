"""Identity of a model by the content of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from specdec.models.weights.weight_files import find_weight_files

_TOKENIZER = "tokenizer.json"
_TOKENIZER_PARTS = (
    "tiktoken.model",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
)
"""Files that a tokenizer is made from where there is no tokenizer.json."""


def weights_fingerprint(directory: Path) -> str:
    """Return the SHA-256 of the weight files of a model, as hexadecimal digits.

    It reads them once in a process, unless they change. Raises UnsupportedModelError for a
    directory without weights.
    """
    return files_fingerprint(find_weight_files(directory))


def model_fingerprint(directory: Path) -> str:
    """Return the SHA-256 of a model's weights, configuration and tokenizer; see the weights'."""
    tokenizer = (_TOKENIZER,) if (directory / _TOKENIZER).is_file() else _TOKENIZER_PARTS
    others = (directory / name for name in ("config.json", *tokenizer))
    return files_fingerprint([*find_weight_files(directory), *filter(Path.is_file, others)])


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the names and contents of some files, likewise."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        status = path.stat()
        content = _file_fingerprint(path.resolve(), status.st_size, status.st_mtime_ns)
        whole.update(f"{path.name}\0{content}\n".encode())
    return whole.hexdigest()


@lru_cache(maxsize=64)
def _file_fingerprint(path: Path, _size: int, _mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
