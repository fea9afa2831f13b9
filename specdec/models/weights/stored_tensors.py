"""The tensors of weight files by name, as they are stored."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specdec.models.weights.pickled_tensors import DTYPES, dtype_name, read_pickled
from specdec.models.weights.tensor_headers import (
    HeaderSource,
    StoredFile,
    TensorHeaders,
    text_name,
    with_views,
)
from specdec.models.weights.tensor_views import ExpertView, JoinedView, StoredPart
from specdec.models.weights.weight_files import files_of_tensors, read_stored
from specdec.types.errors import UnsupportedModelError

_MOST_MAPPED_BYTES = 64 << 20

SHORT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that float32 represents exactly, by their names in safetensors."""


class TensorSource(HeaderSource, Protocol):
    """Tensors by name. Access to a missing tensor raises UnsupportedModelError."""

    def slice(self, name: str, *window: slice) -> Tensor:
        """Return a part of a tensor as it is stored; all of it without a window."""
        ...


class StoredTensors(TensorHeaders):
    """The tensors of a checkpoint by name, in one or several files.

    Tensors of the text model in a model that reads images too have the names of a text model; those
    that layers read otherwise than they are stored are views.
    Reading a missing tensor raises UnsupportedModelError.

    The file of the last read stays mapped until 64 MiB of its tensors have been read: the pages
    that were read stay resident while it is, or while one of its tensors is in use. These share one
    storage and its version counter, so that a write to one counts as a write to all. Another file
    of the same path, or other content, raises UnsupportedModelError when it is mapped.
    """

    def __init__(self, paths: Iterable[Path], directory: Path) -> None:
        """Read the headers of all files. Raises UnsupportedModelError for an unreadable file."""
        found = {path: read_stored(path) for path in paths}
        self._stored = {
            text_name(name): found[path][name] for name, path in files_of_tensors(found).items()
        }
        headers, self._views = with_views(self._stored)
        super().__init__(headers, directory)
        self._mapped = torch.empty(0, dtype=torch.uint8)  # the file of the last read
        self._last: tuple[StoredFile | None, int] = (None, 0)  # that file, and the bytes read

    def slice(self, name: str, *window: slice) -> Tensor:
        """See TensorSource."""
        self._header(name)
        view = self._views.get(name)
        if isinstance(view, ExpertView):
            rows, cols = window or (slice(None), slice(None))
            part = self._part(view.part(rows, cols))[0]
            return part.t() if view.is_transposed else part
        if isinstance(view, JoinedView):
            parts = view.parts(*(window or (slice(None),)))
            return torch.cat([self._part(part) for part in parts])
        return self._part(StoredPart(name, window))

    def _part(self, part: StoredPart) -> Tensor:
        stored = self._stored[part.stored]
        if stored.dtype not in DTYPES:
            raise UnsupportedModelError(f"{part.stored} has type {stored.dtype}; torch has none")
        file, num_bytes = self._last
        if file is not stored.file or num_bytes >= _MOST_MAPPED_BYTES:
            self._mapped, num_bytes = _mapped(stored.file), 0
        self._last = stored.file, num_bytes + stored.end - stored.begin
        dtype, content = DTYPES[stored.dtype], self._mapped[stored.begin : stored.end]
        if stored.begin % dtype.itemsize == 0:
            return content.view(dtype).view(stored.shape)[part.window]
        values = content.view(*stored.shape, dtype.itemsize)[part.window]
        return values.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)


class PickledTensors:
    """The tensors of pickled files by name, a TensorSource; files in zip format stay mapped."""

    def __init__(self, paths: Iterable[Path], directory: Path) -> None:
        """Open all files. Raises UnsupportedModelError for content other than named tensors."""
        self._directory = directory
        found = {path: read_pickled(path) for path in paths}
        self._tensors = {name: found[path][name] for name, path in files_of_tensors(found).items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        return tuple(self._stored(name).shape)

    def dtype(self, name: str) -> str:
        """See TensorSource."""
        return dtype_name(self._stored(name).dtype)

    def slice(self, name: str, *window: slice) -> Tensor:
        """See TensorSource."""
        tensor = self._stored(name)
        return tensor[window] if window else tensor

    def _stored(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise UnsupportedModelError(f"{self._directory} has no tensor {name}")
        return self._tensors[name]


def _mapped(file: StoredFile) -> Tensor:
    """Map a file to memory, as bytes; later writes to the tensor do not change it."""
    path = file.path
    try:
        content = torch.from_file(str(path), size=file.size, dtype=torch.uint8)
        present = StoredFile.of(path, path.stat())
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(f"{path} cannot be read: {reason[:500]}") from error
    if present != file:
        raise UnsupportedModelError(f"{path} has changed while it was read; load it again")
    return content
