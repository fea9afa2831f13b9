"""The rule that each tensor of a checkpoint is what a model and its quantization expect.

It looks at types and shapes, so that `specdec models show` and a rank that loads apply the same
rule before anything is read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from specdec.models.weights.tensor_headers import HeaderSource, require_values, sibling
from specdec.types.errors import UnsupportedModelError

_MAX_SHOWN = 8
_INDEX = re.compile(r"\d+")

_ROTARY = re.compile(r".*rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)")
_ACTIVATIONS = re.compile(
    r".*\.(input_(global_)?scale|input_zero_point|activation_scale|weight_format"
    r"|([kvq]|kv|prob_output|output)_(scale|zero_point))"
)
_MTP = ".eh_proj.weight"
_DRAFTING_LAYERS = "layers for drafting"
_DRAFTING = re.compile(r"(model\.)?mtp(_\w+)?\..*|medusa_heads?\..*")
_OTHER_MEDIA = re.compile(
    r"(model\.)?(vision_\w+|visual|vit|audio_\w+|multi_modal_projector|mm_projector|image_newline"
    r"|embed_(vision|audio))\b.*"
)
_KNOWN = {
    "a copy of the tied embedding": re.compile(r"lm_head\.weight"),
    "tables of rotary embeddings": _ROTARY,
    "scales of activations and of cached keys and values": _ACTIVATIONS,
    _DRAFTING_LAYERS: _DRAFTING,
    "parts that read images or audio": _OTHER_MEDIA,
}
"""Tensors that a decoder has no use for, by kind."""

_CODES = re.compile(
    r"qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|quant_state|nested_\w+|pre_quant_scale"
    r"|weight_(packed|shape|g_idx|zero_point|scale\w*|global_scale)"
)
"""Names of the tensors with which a weight is stored as codes, after its own name."""


class Layout(Protocol):
    """The part of a WeightFormat that needs no values."""

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """Return whether this weight is quantized; some layers of a checkpoint usually are not."""
        ...

    def parts(self, tensors: HeaderSource, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names of the stored tensors of a quantized weight of this shape.

        Raises UnsupportedModelError where one is missing, or has another type or shape.
        """
        ...


class ListedHeaders(HeaderSource, Protocol):
    """A HeaderSource whose names can be listed."""

    def __iter__(self) -> Iterator[str]: ...


@dataclass(frozen=True)
class CheckpointFindings:
    """Findings from the headers of a checkpoint.

    faults: why it does not load, a line each. unknown: tensors that nothing reads; known: others
    that nothing reads, by kind. num_quantized: weights that are stored as codes.
    """

    faults: tuple[str, ...]
    unknown: tuple[str, ...]
    known: Mapping[str, tuple[str, ...]]
    num_quantized: int

    def require(self) -> None:
        """Raise UnsupportedModelError for a checkpoint that does not load."""
        if self.faults:
            others = len(self.faults) - 1
            more = f" ({others} more faults: specdec models show lists them)" if others else ""
            raise UnsupportedModelError(f"{self.faults[0]}{more}")

    @property
    def unused(self) -> str:
        """The unknown tensors that nothing reads, in one line; empty without any."""
        return summary(self.unknown) if self.unknown else ""

    @property
    def known_unused(self) -> str:
        """The others that nothing reads, in one line; empty without any."""
        return "; ".join(f"{what}: {summary(names)}" for what, names in self.known.items())


def stored_parts(
    tensors: HeaderSource, layout: Layout | None, name: str, shape: tuple[int, ...]
) -> tuple[str, ...]:
    """Return the names of the stored tensors that make up a tensor of this shape.

    layout: of quantized weights; None without any. Raises UnsupportedModelError for a tensor that
    is missing, has another shape, or is stored as codes that the layout does not describe.
    """
    if layout is not None and layout.holds(tensors, name):
        if name.endswith(".weight") and len(shape) != 2:
            raise UnsupportedModelError(
                f"{name} is stored as codes, and is no matrix: {list(shape)}"
            )
        return layout.parts(tensors, name, shape)
    packed = sibling(name, "qweight"), sibling(name, "weight_packed")
    if name not in tensors and any(each in tensors for each in packed):
        raise UnsupportedModelError(
            f"{name} is stored as codes, and the files describe no quantization that has them"
        )
    if (found := tensors.shape(name)) != shape and name in tensors:
        require_values(tensors, name)
        limit = f"config.json requires {list(shape)}"
        raise UnsupportedModelError(f"{name} has shape {list(found)}; {limit}")
    require_values(tensors, name)
    return (name,)


def check_tensors(
    tensors: ListedHeaders, layout: Layout | None, expected: Mapping[str, tuple[int, ...]]
) -> CheckpointFindings:
    """Check all tensors. expected: the shape of each that a model reads, by name."""
    used, faults = dict[str, tuple[str, ...]](), dict[str, str]()
    for name, shape in expected.items():
        try:
            used[name] = stored_parts(tensors, layout, name, shape)
        except UnsupportedModelError as error:
            faults[name] = str(error)
    quantized = {name for name, parts in used.items() if parts != (name,)}
    rest = set(tensors).difference(faults, *used.values())
    unknown, known = list[str](), defaultdict[str, list[str]](list)
    drafting = {name.removesuffix(_MTP) for name in rest if name.endswith(_MTP)}
    for name in sorted(rest):
        weight = _weight_beside(name)
        is_part = weight in quantized or bool(_CODES.fullmatch(name.rpartition(".")[2]))
        if (kind := _known_kind(name, drafting)) is not None:
            known[kind].append(name)
        elif weight not in expected or not is_part or name.endswith(".bias"):
            unknown.append(name)
        elif weight not in faults:
            faults[weight] = f"{name} belongs to {weight}, and no described layout has a use for it"
    by_kind = {kind: tuple(names) for kind, names in known.items()}
    return CheckpointFindings(tuple(faults.values()), tuple(unknown), by_kind, len(quantized))


def is_of_activations(name: str) -> bool:
    """Return whether a tensor is a scale of activations or of cached keys and values."""
    return _ACTIVATIONS.fullmatch(name) is not None


def _weight_beside(name: str) -> str:
    """Return the weight that a tensor is stored beside, by the names of all layouts."""
    stem = name.rpartition(".")[0]
    return stem if stem.endswith(".weight") else f"{stem}.weight"


def _known_kind(name: str, drafting: Set[str]) -> str | None:
    """Return what a tensor is that no decoder uses; None for another one.

    drafting: prefixes of the layers for drafting.
    """
    if ".".join(name.split(".", 3)[:3]) in drafting:
        return _DRAFTING_LAYERS
    return next((what for what, pattern in _KNOWN.items() if pattern.fullmatch(name)), None)


def summary(names: Sequence[str]) -> str:
    """Return the number of tensors, and their names with `*` for the numbers in them."""
    kinds = Counter(_INDEX.sub("*", name) for name in names)
    shown = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(_MAX_SHOWN))
    others = len(kinds) - _MAX_SHOWN
    more = f", and {others} other names" if others > 0 else ""
    return f"{len(names)} tensors, {shown}{more}"
