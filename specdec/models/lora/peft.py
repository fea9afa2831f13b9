"""Adapters in PEFT's layout: `adapter_config.json` beside `adapter_model.safetensors`.

Reading needs no torch where the weights are in safetensors. Everything that PEFT can save and that
changes more than the linear layers of a decoder is refused by its name.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from specdec.models.weights.fingerprint import files_fingerprint
from specdec.models.weights.tensor_headers import TensorHeaders, module_name, require_values
from specdec.models.weights.weight_files import read_headers
from specdec.types.errors import UnsupportedModelError

CONFIG_FILE = "adapter_config.json"
HEAD_KEY = "head_sha256"
"""Key of the configuration beside PEFT's; see AdapterFiles."""
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")

T = TypeVar("T")

_MAX_CONFIG_BYTES = 2**20
_LARGEST = 2**24
PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight")
_DIGEST = re.compile("([0-9a-f]{64})?")
_MODULE = re.compile(r"\^?\w+(\.\w+)*")
_OF_HEAD = re.compile(r"^(fc|midlayer|eagle_module|medusa_head|(model\.)?mtp)(\.|$)|(^|\.)eh_proj$")
"""Modules of published draft heads that no target has; `specdec.models.heads.formats`."""
_VOCABULARY = ("lm_head", "embed_tokens")

_PLAIN_STARTS = ("true", "false", "none", "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which PEFT leaves the weights of the model as they are."""

_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "use_dora": (bool, "weight-decomposed adapters (DoRA) are not supported"),
    "modules_to_save": (bool, "whole modules beside the adapter are not supported"),
    "lora_bias": (bool, "biases of adapters are not supported"),
    "bias": (lambda value: value not in (None, "none"), "trained biases are not supported"),
    "trainable_token_indices": (bool, "trained embeddings are not supported"),
    "target_parameters": (bool, "adapters of parameters, such as experts, are not supported"),
    "layer_replication": (bool, "replicated layers are not supported"),
    "use_qalora": (bool, "grouped inputs (QALoRA) are not supported"),
    "alora_invocation_tokens": (bool, "activated adapters (aLoRA) are not supported"),
    "megatron_config": (bool, "Megatron's parallel layers are not supported"),
    "init_lora_weights": (
        lambda value: str(value).lower() not in _PLAIN_STARTS,
        "it may change the weights of the model; PEFT converts adapters of PiSSA, OLoRA and CorDA "
        "alone (path_initial_model_for_weight_conversion)",
    ),
}
"""Keys with which an adapter is more than pairs of matrices: test of the value, and reason."""


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter in a directory, read and checked without its weights.

    ranks, scales: by module of the model, such as `model.layers.0.self_attn.q_proj`; the update of
    its weight is scale * B A with A [rank, in_features] and B [out_features, rank].
    shapes: of both matrices, by module: A's, then B's. names: of the tensors, likewise.
    Modules have the names of a text model's tensors (`text_name`). head_sha256: fingerprint of the
    weights of the draft head that it was made for, which `specdec train` records; else empty.
    """

    directory: Path
    weights: Path
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    shapes: Mapping[str, tuple[tuple[int, int], tuple[int, int]]]
    names: Mapping[str, tuple[str, str]]
    head_sha256: str = ""

    @classmethod
    def read(cls, directory: Path, max_rank: int = _LARGEST) -> AdapterFiles:
        """Read an adapter whose ranks are at most `max_rank`.

        Raises UnsupportedModelError, in one line, for files that are missing, malformed, or hold
        more than low-rank updates of linear layers.
        """
        config = _PeftConfig.read(directory / CONFIG_FILE)
        weights = _weight_file(directory)
        names, shapes = _matrices(weights)
        ranks: dict[str, int] = {}
        for module, (down, up) in shapes.items():
            ranks[module] = _rank_of(module, down, up)
            config.require_rank(module, ranks[module])
            if ranks[module] > max_rank:
                raise UnsupportedModelError(
                    f"{directory}: {module} has rank {ranks[module]}; it must be at most "
                    f"max_lora_rank ({max_rank})"
                )
        scales = {module: config.scale(module, rank) for module, rank in ranks.items()}
        own = _own_names(weights, names)
        return cls(
            directory,
            weights,
            {own[module]: rank for module, rank in ranks.items()},
            {own[module]: scale for module, scale in scales.items()},
            {own[module]: shape for module, shape in shapes.items()},
            {own[module]: pair for module, pair in names.items()},
            config.head_sha256,
        )

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the configuration and the weights."""
        return files_fingerprint([self.directory / CONFIG_FILE, self.weights])

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(self.ranks.values())

    def renamed(self, names: Mapping[str, str]) -> AdapterFiles:
        """Return the adapter with other names of modules, where `names` has such."""

        def of_modules(values: Mapping[str, T]) -> dict[str, T]:
            return {names.get(module, module): value for module, value in values.items()}

        return replace(
            self,
            ranks=of_modules(self.ranks),
            scales=of_modules(self.scales),
            shapes=of_modules(self.shapes),
            names=of_modules(self.names),
        )

    def require_modules(
        self, known: Mapping[str, tuple[int, ...]], owner: str = "model's decoder layers"
    ) -> None:
        """Raise UnsupportedModelError unless each module is one of these with the same shape.

        known: [out_features, in_features] of the linear layers of the owner, by name.
        """
        for module, (down, up) in self.shapes.items():
            shape = known.get(module)
            if shape is None and _OF_HEAD.search(module):
                raise UnsupportedModelError(
                    f"{self.directory}: {module} is a module of a draft head, whose adapter is "
                    "given as draft_path (docs/lora.md)"
                )
            if shape is None:
                raise UnsupportedModelError(
                    f"{self.directory}: {module} is not a linear layer of the {owner}, "
                    f"{_such_as(known)}"
                )
            if (up[0], down[1]) != shape:
                raise UnsupportedModelError(
                    f"{self.directory}: {module} is updated as {[up[0], down[1]]}; the "
                    f"model's weight has shape {list(shape)}: it was made for another model"
                )


@dataclass(frozen=True)
class _PeftConfig:
    """The keys of adapter_config.json that decide what an adapter computes."""

    path: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    target_modules: tuple[str, ...] | None
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    head_sha256: str

    @classmethod
    def read(cls, path: Path) -> _PeftConfig:
        values = _json_object(path)
        kind = values.get("peft_type")
        if kind != "LORA":
            raise UnsupportedModelError(f"{path}: peft_type is {kind!r}; it must be LORA")
        for key, (is_refused, reason) in _REFUSED.items():
            if key in values and is_refused(values[key]):
                raise UnsupportedModelError(f"{path}: {key} is {_short(values[key])}: {reason}")
        for key, value in values.items():
            if key.startswith("use_") and value and key != "use_rslora":  # a method, as use_dora
                raise UnsupportedModelError(f"{path}: {key} is not supported")
        return cls(
            path,
            int(_number(path, values, "r", lowest=1)),
            _number(path, values, "lora_alpha"),
            _flag(path, values, "use_rslora"),
            _target_modules(path, values.get("target_modules")),
            _pattern(path, values, "rank_pattern"),
            _pattern(path, values, "alpha_pattern"),
            _digest(path, values, HEAD_KEY),
        )

    def require_rank(self, module: str, rank: int) -> None:
        """Raise where a module is not a target, or its rank is not the configured one."""
        targets = self.target_modules
        if targets is not None and not any(_names(each, module) for each in targets):
            raise UnsupportedModelError(f"{self.path}: target_modules does not name {module}")
        expected = _of_module(self.rank_pattern, module, self.rank)
        if rank != expected:
            raise UnsupportedModelError(
                f"{self.path}: {module} has rank {rank}; r or rank_pattern has {expected}"
            )

    def scale(self, module: str, rank: int) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) with `use_rslora` (Kalajdzievski 2023)."""
        alpha = float(_of_module(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise UnsupportedModelError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not JSON") from error
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"{path} must hold a JSON object")
    return values


def _weight_file(directory: Path) -> Path:
    for name in WEIGHT_FILES:
        if (directory / name).is_file():
            return directory / name
    raise UnsupportedModelError(f"{directory} has no {' or '.join(WEIGHT_FILES)}")


def _matrices(
    path: Path,
) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[tuple[int, int], tuple[int, int]]]]:
    """Return the names and the shapes of A and B of each module in a file of weights."""
    found: dict[str, dict[str, tuple[str, tuple[int, int]]]] = {}
    headers = TensorHeaders(read_headers((path,)))
    for name in headers:
        shape = headers.shape(name)
        require_values(headers, name)
        match = _MATRIX.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(f"{path}: tensor {name} is not a LoRA matrix of a layer")
        module = match["module"].removeprefix(PREFIX)
        if module.rpartition(".")[2] in _VOCABULARY:
            raise UnsupportedModelError(
                f"{path}: {module} has an adapter; only the linear layers of decoder layers may"
            )
        sides = found.setdefault(module, {})
        if match["side"] in sides:
            raise UnsupportedModelError(f"{path}: {module} has lora_{match['side']} twice")
        if len(shape) != 2:
            raise UnsupportedModelError(f"{path}: {name} has shape {list(shape)}, not a matrix's")
        sides[match["side"]] = name, (shape[0], shape[1])
    for module, sides in found.items():
        if missing := {"A", "B"} - sides.keys():
            raise UnsupportedModelError(f"{path}: {module} has no lora_{missing.pop()}")
    if not found:
        raise UnsupportedModelError(f"{path} has no LoRA matrices")
    names = {module: (sides["A"][0], sides["B"][0]) for module, sides in found.items()}
    return names, {module: (sides["A"][1], sides["B"][1]) for module, sides in found.items()}


def _own_names(path: Path, modules: Iterable[str]) -> dict[str, str]:
    """Return the name that a text model has for each module of a file."""
    found = {each: module_name(f"{each}.weight") for each in modules}
    twice = [own for own, count in Counter(found.values()).items() if count > 1]
    if twice:
        raise UnsupportedModelError(f"{path}: {twice[0]} has two names in the file")
    return found


def _rank_of(module: str, down: tuple[int, int], up: tuple[int, int]) -> int:
    if down[0] != up[1] or down[0] < 1:
        raise UnsupportedModelError(
            f"{module}: lora_A has shape {list(down)} and lora_B {list(up)}; the first size of A "
            "must be the last of B"
        )
    return down[0]


def _number(path: Path, values: Mapping[str, Any], key: str, lowest: int | None = None) -> float:
    value: Any = values.get(key)
    is_valid = type(value) is int or (lowest is None and type(value) is float)
    if not is_valid or not (lowest or -_LARGEST) <= value <= _LARGEST:
        wanted = "a number" if lowest is None else f"a whole number of at least {lowest}"
        raise UnsupportedModelError(f"{path}: {key} is {_short(value)}; it must be {wanted}")
    return float(value)


def _digest(path: Path, values: Mapping[str, Any], key: str) -> str:
    """Return a SHA-256; empty without one."""
    value = values.get(key, "")
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise UnsupportedModelError(
            f"{path}: {key} is {_short(value)}; it must be 64 hexadecimal digits in lower case"
        )
    return value


def _such_as(names: Iterable[str]) -> str:
    first = next(iter(names), None)
    return "which has none" if first is None else f"such as {first}"


def _flag(path: Path, values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModelError(f"{path}: {key} is {_short(value)}; it must be true or false")
    return bool(value)


def _target_modules(path: Path, value: object) -> tuple[str, ...] | None:
    """Return the names of target modules; None for a pattern, where the tensors decide alone."""
    if value is None or isinstance(value, str):
        return None
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise UnsupportedModelError(
        f"{path}: target_modules is {_short(value)}; it must be a string or a list of strings"
    )


def _pattern(path: Path, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the values of single modules.

    PEFT takes their keys as regular expressions. Names of modules are accepted, from the model's
    root with a leading ^: the expressions of a file could take any time.
    """
    pattern = values.get(key) or {}
    if not isinstance(pattern, dict):
        raise UnsupportedModelError(f"{path}: {key} is {_short(pattern)}; it must be an object")
    for name in pattern:
        if not _MODULE.fullmatch(name):
            raise UnsupportedModelError(f"{path}: {key} has {name!r}, which is no module's name")
        _number(path, pattern, name, lowest=1 if key == "rank_pattern" else None)
    return pattern


def _of_module(pattern: Mapping[str, Any], module: str, default: float) -> Any:
    """Return the value of the first name that fits a module."""
    return next((value for name, value in pattern.items() if _names(name, module)), default)


def _names(name: str, module: str) -> bool:
    """Return whether a name is that of a module, or of its last parts."""
    if name.startswith("^"):
        return module == name[1:]
    return module == name or module.endswith(f".{name}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
