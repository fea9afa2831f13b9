"""Identity of a target model by the content of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specdec.models.weights.weight_files import find_weight_files

_OTHER_FILES = ("config.json", "tokenizer.json")


def target_fingerprint(directory: Path) -> str:
    """Return the SHA-256 of a model's weights, configuration and tokenizer, as hexadecimal digits.

    It reads all weights once. Raises UnsupportedModelError for a directory without weights.
    """
    others = [directory / name for name in _OTHER_FILES if (directory / name).is_file()]
    whole = hashlib.sha256()
    for path in sorted([*find_weight_files(directory), *others]):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
        whole.update(f"{path.name}\0{content.hexdigest()}\n".encode())
    return whole.hexdigest()
