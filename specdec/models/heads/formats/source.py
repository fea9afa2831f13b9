"""Access to the fields and tensors of a head's checkpoint, with one clear error for each fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.models.weights.quantization_config import with_quantization
from specdec.models.weights.tensor_headers import (
    TensorHeader,
    TensorHeaders,
    require_values,
    with_views,
)
from specdec.models.weights.weight_files import SAFETENSORS, find_weight_files, read_headers
from specdec.types.errors import ModelNotFoundError, UnsupportedModelError

Shape = tuple[int, ...]

_MAX_COUNT = 2**31 - 1
MAX_MODULES = 1024
"""Limit of the layers of a head, and of the heads in a checkpoint."""


@dataclass(frozen=True)
class Fields:
    """Checked access to the keys of a JSON object; null and missing keys have the default."""

    raw: Mapping[str, Any]
    path: Path

    def __contains__(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _MAX_COUNT
    ) -> int:
        """Return a whole number from `least` to `most`."""
        value = self._value(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.error(name, f"a whole number from {least} to {most}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number above 0."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or value is True or not 0 < value < math.inf:
            raise self.error(name, "a number above 0")
        return float(value)

    def counts(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        value = self.raw.get(name)
        if not isinstance(value, list) or not value or any(type(each) is not int for each in value):
            raise self.error(name, "a list of whole numbers")
        return tuple(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a string, or None."""
        return self.text(name) if name in self else None

    def nested(self, name: str) -> Fields:
        """Return a nested object; an empty one if it is missing."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "a JSON object")
        return Fields(value, self.path)

    def require_equal(self, name: str, expected: int, owner: str) -> None:
        """Raise UnsupportedModelError if the field is given and differs from `expected`."""
        if name in self and self.raw[name] != expected:
            raise self.error(name, f"{expected}, as in {owner}")

    def error(self, name: str, limit: str) -> UnsupportedModelError:
        """Return the error for a value out of its limits."""
        return UnsupportedModelError(
            f"{name} in {self.path} is {self.raw.get(name)!r}; it must be {limit}"
        )

    def _value(self, name: str, default: object) -> object:
        value = self.raw.get(name)
        return default if value is None else value


@dataclass(frozen=True)
class TensorNames:
    """The tensors of a checkpoint under the names of this package.

    stored: the name in the checkpoint of each tensor. shapes: of each tensor.
    """

    directory: Path
    stored: Mapping[str, str]
    shapes: Mapping[str, Shape]

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str, num_dims: int) -> Shape:
        """Return the shape of a tensor that must have `num_dims` dimensions."""
        if name not in self.shapes:
            raise UnsupportedModelError(f"{self.directory} has no tensor {name}")
        shape = self.shapes[name]
        if len(shape) != num_dims:
            raise UnsupportedModelError(f"{self._described(name)}; expected {num_dims} dimensions")
        return shape

    def count(self, prefix: str) -> int:
        """Return the number of consecutive indices i from 0 on with tensors `prefix`.i.*."""
        present = {
            name.removeprefix(f"{prefix}.").split(".")[0]
            for name in self.shapes
            if name.startswith(f"{prefix}.")
        }
        count = 0
        while str(count) in present:
            count += 1
        return count

    def require(
        self, expected: Mapping[str, Shape], purpose: str, ignored: Callable[[str], bool]
    ) -> None:
        """Raise UnsupportedModelError unless these are the tensors and their shapes.

        purpose: the format and the sizes that the shapes follow from. ignored: names of tensors
        that may be present without a use.
        """
        for name, shape in expected.items():
            if name not in self.shapes:
                raise UnsupportedModelError(
                    f"{self.directory} has no tensor {name}; expected one of shape {list(shape)} "
                    f"{purpose}"
                )
            if self.shapes[name] != shape:
                raise UnsupportedModelError(
                    f"{self._described(name)}; expected {list(shape)} {purpose}"
                )
        for name in self.shapes:
            if name not in expected and not ignored(name):
                raise UnsupportedModelError(f"{self._described(name)}; expected none {purpose}")

    def _described(self, name: str) -> str:
        return f"{self.directory}: tensor {self.stored[name]} has shape {list(self.shapes[name])}"


@dataclass(frozen=True)
class HeadSource:
    """The config.json and the weight files of a head.

    shapes: of all tensors, by their names in the files; of a quantized weight that of its values.
    types: those of the values, by their names in safetensors.
    """

    directory: Path
    fields: Fields
    files: tuple[Path, ...]
    shapes: Mapping[str, Shape]
    types: Mapping[str, str]

    @classmethod
    def open(cls, directory: Path) -> HeadSource:
        """Read config.json and the headers of the weight files.

        A directory without config.json is taken for one of original Medusa weights. Raises
        ModelNotFoundError and UnsupportedModelError.
        """
        files, fields = find_weight_files(directory), read_fields(directory)
        headers = read_headers(files)
        if files[0].suffix == SAFETENSORS:
            headers, _ = with_views(headers)
        if "quantization_config" in fields:
            from specdec.models.weights.dequantized_tensors import (
                dequantized_headers,  # imports torch, which few processes need
            )

            quantization = fields.nested("quantization_config").raw
            headers = dequantized_headers(headers, files, directory, quantization)
        shapes = {name: header.shape for name, header in headers.items()}
        types = {name: header.dtype for name, header in headers.items()}
        return cls(directory, fields, files, shapes, types)

    @property
    def architecture(self) -> str:
        """The first of `architectures`; none without any."""
        names = self.fields.raw.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else "none"

    @property
    def short_names(self) -> set[str]:
        """The names of the tensors, without the prefix of a model."""
        return {name.removeprefix("model.") for name in self.shapes}

    @property
    def is_pard(self) -> bool:
        """Return whether the files are a draft model that drafts in parallel (PARD)."""
        return "pard_token" in self.fields and "mask_hidden" not in self.shapes

    def require_values(self, names: TensorNames, used: Iterable[str]) -> None:
        """Raise UnsupportedModelError where a weight or bias that is used is stored as codes."""
        headers = TensorHeaders(
            {n: TensorHeader(self.types[n], self.shapes[n]) for n in self.types}
        )
        for name in used:
            if name.endswith((".weight", ".bias")):
                require_values(headers, names.stored[name])

    def restricted(self, is_used: Callable[[str], bool]) -> HeadSource:
        """Return the source with some of its tensors only."""
        shapes = {name: shape for name, shape in self.shapes.items() if is_used(name)}
        return replace(self, shapes=shapes)

    def renamed(self, rename: Callable[[str], str]) -> TensorNames:
        """Return the tensors under new names; `rename` maps a stored name to the new one."""
        stored: dict[str, str] = {}
        for name in self.shapes:
            new = rename(name)
            if new in stored:
                raise UnsupportedModelError(
                    f"{self.directory}: tensors {stored[new]} and {name} are the same weight"
                )
            stored[new] = name
        shapes = {new: self.shapes[name] for new, name in stored.items()}
        return TensorNames(self.directory, stored, shapes)


def read_fields(directory: Path) -> Fields:
    """Return the keys of a head's config.json; none if only `medusa_lm_head.pt` is there."""
    path = directory / "config.json"
    if not path.is_file():
        if (directory / "medusa_lm_head.pt").is_file():
            return Fields({}, path)
        raise ModelNotFoundError(f"{directory} has no config.json")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UnsupportedModelError(f"{path} is not a JSON object")
    return Fields(with_quantization(directory, raw), path)
