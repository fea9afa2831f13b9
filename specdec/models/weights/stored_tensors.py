"""The tensors of weight files by name, as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.models.weights.pickled_tensors import dtype_name, read_pickled
from specdec.models.weights.tensor_headers import HeaderSource, text_name
from specdec.models.weights.tensor_views import (
    ExpertView,
    JoinedView,
    StoredPart,
    TensorView,
    tensor_views,
)
from specdec.models.weights.weight_files import files_of_tensors
from specdec.types.errors import UnsupportedModelError

_MOST_OPEN_BYTES = 64 << 20
_Window = tuple[slice, ...]

SHORT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that float32 represents exactly, by their names in safetensors."""


class TensorSource(HeaderSource, Protocol):
    """Tensors by name. Access to a missing tensor raises UnsupportedModelError."""

    def slice(self, name: str, *window: slice) -> Tensor:
        """Return a part of a tensor as it is stored; all of it without a window."""
        ...


@dataclass(frozen=True)
class _StoredTensor:
    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class StoredTensors:
    """The tensors of a checkpoint by name, in one or several files.

    Tensors of the text model in a model that reads images too have the names of a text model; those
    that layers read otherwise than they are stored are views.
    Reading a missing tensor raises UnsupportedModelError.

    The file of the last read stays open until 64 MiB of its tensors have been read: opening parses
    the whole header. The pages that were read stay resident while it is open or one of its tensors
    is in use.
    """

    def __init__(self, paths: Iterable[Path], directory: Path) -> None:
        """Read the headers of all files. Raises UnsupportedModelError for an unreadable file."""
        self._directory = directory
        self._tensors: dict[str, _StoredTensor] = {}
        self._parts: dict[str, _StoredTensor] = {}
        self._views: dict[str, TensorView] = {}
        self._last: tuple[Path | None, Any, int] = (None, None, 0)  # an open file, and bytes read
        found = {path: _tensors_of(path) for path in paths}
        for name, path in files_of_tensors(found).items():
            self._tensors[text_name(name)] = found[path][name]
        self._add_views()

    def _add_views(self) -> None:
        views = tensor_views({name: each.shape for name, each in self._tensors.items()})
        for name in {part for view in views.values() for part in view.stored}:
            self._parts[name] = self._tensors.pop(name)
        for name, view in views.items():
            first = self._parts[view.stored[0]]
            self._tensors[name] = _StoredTensor(first.path, name, view.shape, first.dtype)
        self._views = views

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        """See HeaderSource."""
        return self._stored(name).dtype

    def slice(self, name: str, *window: slice) -> Tensor:
        """See TensorSource."""
        stored, view = self._stored(name), self._views.get(name)
        if isinstance(view, ExpertView):
            rows, cols = window or (slice(None), slice(None))
            part = self._part(view.part(rows, cols))[0]
            return part.t() if view.is_transposed else part
        if isinstance(view, JoinedView):
            parts = view.parts(*(window or (slice(None),)))
            return torch.cat([self._part(part) for part in parts])
        return self._read(stored, window)

    def _part(self, part: StoredPart) -> Tensor:
        return self._read(self._parts[part.stored], part.window)

    def _read(self, stored: _StoredTensor, window: _Window) -> Tensor:
        path, file, num_bytes = self._last
        if path != stored.path or num_bytes >= _MOST_OPEN_BYTES:
            file, num_bytes = _open(stored.path), 0
        name = stored.name
        tensor: Tensor = file.get_slice(name)[window] if window else file.get_tensor(name)
        num_bytes += prod(stored.shape) * tensor.element_size()
        self._last = stored.path, file, num_bytes
        return tensor

    def _stored(self, name: str) -> _StoredTensor:
        if name not in self._tensors:
            raise UnsupportedModelError(f"{self._directory} has no tensor {name}")
        return self._tensors[name]


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


def _tensors_of(path: Path) -> dict[str, _StoredTensor]:
    """Return the tensors of a file by their stored names."""
    with _open(path) as file:
        names: list[str] = file.keys()
        slices = {name: file.get_slice(name) for name in names}
        return {
            name: _StoredTensor(path, name, tuple(each.get_shape()), each.get_dtype())
            for name, each in slices.items()
        }


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(f"{path} cannot be read: {reason[:500]}") from error
