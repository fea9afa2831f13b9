"""The tensors of safetensors files, as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.models.weights.expert_views import ExpertView, expert_views
from specdec.models.weights.tensor_headers import HeaderSource, text_name
from specdec.types.errors import UnsupportedModelError

SHORT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that float32 represents exactly, by their names in safetensors."""


class TensorSource(HeaderSource, Protocol):
    """Tensors by name. Access to a missing tensor raises UnsupportedModelError."""

    def slice(self, name: str, *window: slice) -> Tensor:
        """Return a part of a tensor as it is stored; all of it without a window."""
        ...


@dataclass(frozen=True)
class _StoredTensor:
    """view: the part of the tensor that it is; None for all of it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    view: ExpertView | None = None


class StoredTensors:
    """The tensors of a checkpoint by name, in one or several files.

    Tensors of the text model in a model that reads images too have the names of a text model, and
    the experts in a tensor of all experts those of separate ones.
    Reading a missing tensor raises UnsupportedModelError.

    A file is opened for each read: it stays mapped, and the pages that were read stay resident,
    while it is open or one of its tensors is in use.
    """

    def __init__(self, paths: Iterable[Path], directory: Path) -> None:
        """Read the headers of all files. Raises UnsupportedModelError for an unreadable file."""
        self._directory = directory
        self._tensors: dict[str, _StoredTensor] = {}
        for path in paths:
            with _open(path) as file:
                names: list[str] = file.keys()
                for name in names:
                    tensor = file.get_slice(name)
                    shape = tuple(tensor.get_shape())
                    stored = _StoredTensor(path, name, shape, tensor.get_dtype())
                    self._tensors[text_name(name)] = stored
        self._divide_stacks()

    def _divide_stacks(self) -> None:
        """Replace tensors of all experts by those of each one."""
        views = expert_views({name: each.shape for name, each in self._tensors.items()})
        stacks = {
            name: self._tensors.pop(name) for name in {each.stored for each in views.values()}
        }
        for name, view in views.items():
            self._tensors[name] = replace(stacks[view.stored], shape=view.shape, view=view)

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
        stored = self._stored(name)
        with _open(stored.path) as file:
            own = stored.name
            if stored.view is not None:
                rows, cols = window or (slice(None), slice(None))
                part: Tensor = file.get_slice(own)[stored.view.window(rows, cols)]
                return part[0]
            tensor: Tensor = file.get_slice(own)[window] if window else file.get_tensor(own)
        return tensor

    def _stored(self, name: str) -> _StoredTensor:
        if name not in self._tensors:
            raise UnsupportedModelError(f"{self._directory} has no tensor {name}")
        return self._tensors[name]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(f"{path} cannot be read: {reason[:500]}") from error
