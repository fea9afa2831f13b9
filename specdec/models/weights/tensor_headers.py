"""Types and shapes of stored tensors, and the rule that each one is what its reader expects.

The rule needs no values, so that it applies to a whole checkpoint before anything is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from specdec.models.weights.tensor_views import TensorView, tensor_views
from specdec.types.errors import UnsupportedModelError

FLOATS = ("F32", "BF16", "F16", "F64")
"""Types of stored values, by their names in safetensors; other types are codes or indices."""

SCALES = (*FLOATS, "F8_E8M0")
"""Types of scales; the last one has powers of two."""

ONE_SCALE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
"""Shapes of a scale for the whole matrix."""

_TEXT_MODEL_PLACES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),  # since transformers 4.52
)
"""Places of a text model in one that reads images too, and in a separate checkpoint."""

_MARKS = re.compile(r"backbone|embeddings|block_sparse_moe|_layer_norm|forget_gate")
"""One of these is in each name that changes; most names have none."""

_PUBLISHED_NAMES = {
    # Nemotron-H
    re.compile(r"(?:backbone|model)\.embeddings\.(.+)"): r"model.embed_tokens.\1",
    re.compile(r"backbone\.(.+)"): r"model.\1",
    # Kimi Linear, as transformers writes its first layers
    re.compile(r"(.+)\.block_sparse_moe\.((gate|up|down)_proj\..+)"): r"\1.mlp.\2",
    # and as its modules are named, for adapters
    re.compile(r"(model\..+)\.forget_gate\.(.+)"): r"\1.\2",
    # OLMo Hybrid
    re.compile(r"(.+)\.attention_layer_norm\.(.+)"): r"\1.input_layernorm.\2",
    re.compile(r"(.+)\.feedforward_layer_norm\.(.+)"): r"\1.post_attention_layernorm.\2",
    # Granite 4
    re.compile(r"(.+\.block_sparse_moe)\.input_linear\.weight"): r"\1.experts.gate_up_proj",
    re.compile(r"(.+\.block_sparse_moe)\.output_linear\.weight"): r"\1.experts.down_proj",
    re.compile(r"(.+\.block_sparse_moe\.router)\.layer\.weight"): r"\1.weight",
}
"""Names in published files, and those that transformers 5 has for the same tensors."""


class HeaderSource(Protocol):
    """Types and shapes by name. Access to a missing tensor raises UnsupportedModelError."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def dtype(self, name: str) -> str:
        """Return the stored type of a tensor, by its name in safetensors."""
        ...


@dataclass(slots=True)  # not frozen: there are up to 100,000, created at every start
class TensorHeader:
    """Type and shape of a stored tensor. dtype: by its name in safetensors."""

    dtype: str
    shape: tuple[int, ...]


class StoredFile(NamedTuple):
    """A file of tensors as it is when its header is read; another one of its path differs."""

    path: Path
    size: int
    device: int
    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> StoredFile:
        """Return the file with this status."""
        return cls(path, status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns)


@dataclass(slots=True)
class StoredTensor(TensorHeader):
    """A tensor of a safetensors file. begin, end: positions of its bytes in the file."""

    file: StoredFile
    begin: int
    end: int


class TensorHeaders:
    """A HeaderSource of headers by name."""

    def __init__(
        self, headers: Mapping[str, TensorHeader], place: str | Path = "the checkpoint"
    ) -> None:
        """place: of the tensors, for errors."""
        self._headers, self._place = headers, place

    def __contains__(self, name: str) -> bool:
        return name in self._headers

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def shape(self, name: str) -> tuple[int, ...]:
        """See HeaderSource."""
        return self._header(name).shape

    def dtype(self, name: str) -> str:
        """See HeaderSource."""
        return self._header(name).dtype

    def _header(self, name: str) -> TensorHeader:
        if name not in self._headers:
            raise UnsupportedModelError(f"{self._place} has no tensor {name}")
        return self._headers[name]


def text_model_headers(headers: Mapping[str, TensorHeader]) -> TensorHeaders:
    """Return headers under the names of a text model, where it is a part of a larger model."""
    named = {text_name(name): header for name, header in headers.items()}
    return TensorHeaders(with_views(named)[0])


def with_views(
    headers: Mapping[str, TensorHeader],
) -> tuple[dict[str, TensorHeader], dict[str, TensorView]]:
    """Return the headers of the tensors that layers read, and the `tensor_views` among them."""
    views = tensor_views({name: header.shape for name, header in headers.items()})
    parts = {name for view in views.values() for name in view.stored}
    viewed = {
        name: TensorHeader(headers[view.stored[0]].dtype, view.shape)
        for name, view in views.items()
    }
    whole = {name: header for name, header in headers.items() if name not in parts}
    return whole | viewed, views


def text_name(name: str) -> str:
    """Return the name that a text model has for a tensor.

    It is without the place of the text model in a larger one, and that of transformers 5.
    """
    for prefix, place in _TEXT_MODEL_PLACES:
        if name.startswith(prefix):
            name = place + name.removeprefix(prefix)
            break
    for published, own in _PUBLISHED_NAMES.items() if _MARKS.search(name) else ():
        if match := published.fullmatch(name):
            return match.expand(own)
    return name


def module_name(weight: str) -> str:
    """Return the name that a text model has for the module of a weight."""
    return text_name(weight).removesuffix(".weight")


def require_tensor(
    tensors: HeaderSource, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]
) -> str:
    """Return the name of a stored tensor that has one of these types and one of these shapes.

    Raises UnsupportedModelError for another one.
    """
    found, dtype = tensors.shape(name), tensors.dtype(name)
    if found not in shapes:
        expected = " or ".join(str(list(each)) for each in dict.fromkeys(shapes))
        raise UnsupportedModelError(f"{name} has shape {list(found)}; expected {expected}")
    if dtype not in dtypes:
        raise UnsupportedModelError(f"{name} has type {dtype}; expected {' or '.join(dtypes)}")
    return name


def require_values(tensors: HeaderSource, name: str) -> None:
    """Raise UnsupportedModelError for a tensor of codes, which stand for other values."""
    if (dtype := tensors.dtype(name)) not in FLOATS:
        raise UnsupportedModelError(
            f"{name} has codes of type {dtype}, and neither the quantization that the files "
            "describe nor its scales give their values"
        )


def sibling(name: str, suffix: str) -> str:
    """Return the name of another tensor of the layer with the weight `name`."""
    return name.removesuffix("weight") + suffix
