"""The output head of a checkpoint beside embeddings that config.json ties to it.

Fine-tunes store a head of their own, and leave the key of their base model. As in transformers 5,
such a head is used.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdec.models.weights.tensor_headers import text_name
from specdec.models.weights.weight_files import (
    SAFETENSORS,
    files_of_tensors,
    find_weight_files,
    safetensors_header,
)
from specdec.types.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CODES = ("lm_head.qweight", "lm_head.weight_packed")
_CHUNK_BYTES = 2**22


@dataclass(frozen=True)
class _Place:
    """A tensor in a file. kind: its type and shape. mtime_ns: of the file."""

    path: Path
    kind: str
    start: int
    stop: int
    mtime_ns: int

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the tensor."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for start in range(self.start, self.stop, _CHUNK_BYTES):
                yield file.read(min(_CHUNK_BYTES, self.stop - start))


def has_own_head(directory: Path) -> bool:
    """Return whether the files have an output head with other values than the embedding's.

    Equal ones are compared once in a process, unless the files change. False for a directory
    without weights in safetensors.
    """
    try:
        paths = find_weight_files(directory)
    except UnsupportedModelError:
        return False
    is_readable = paths[0].suffix == SAFETENSORS
    headers = {path: safetensors_header(path) for path in paths if is_readable}
    files = {text_name(name): (path, name) for name, path in files_of_tensors(headers).items()}
    if any(name in files for name in _CODES):
        return True
    places = [
        _place(path, headers[path][name])
        for path, name in (files[each] for each in (_EMBEDDING, _HEAD) if each in files)
    ]
    return len(places) == 2 and not _is_equal(*places)


def _place(path: Path, entry: Mapping[str, Any]) -> _Place:
    with path.open("rb") as file:
        data = 8 + struct.unpack("<Q", file.read(8))[0]
    try:
        start, stop = entry["data_offsets"]
        kind = f"{entry['dtype']} {entry['shape']}"
        return _Place(path, kind, data + start, data + stop, path.stat().st_mtime_ns)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{path} has an invalid safetensors header") from error


@lru_cache(maxsize=16)
def _is_equal(embedding: _Place, head: _Place) -> bool:
    if embedding.kind == head.kind and all(
        ours == theirs for ours, theirs in zip(embedding.chunks(), head.chunks(), strict=False)
    ):
        return True
    logger.warning(
        "%s has an output head with other values than the embedding, to which config.json ties it: "
        "the stored head is used",
        head.path,
    )
    return False
