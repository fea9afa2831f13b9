"""Medusa heads (Cai et al. 2024): residual blocks on the target's last hidden state.

Layouts: `medusa_lm_head.pt` of FasterDecoding, the same under `medusa_heads.` as ModelOpt exports
it, with or without the target's tensors beside it, and vLLM's. Head i drafts token i; the target's
own head gives the token before them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.shape import HeadFormat, OutputHeads, Reading, StatelessShape
from specdec.models.heads.formats.source import HeadSource, Shape, TensorNames
from specdec.types.errors import UnsupportedModelError

_RENAMES = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.\2.\3"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"blocks.\1.\2.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"lm_heads.\1.weight"),
)
_PREFIX = re.compile(r"medusa_heads?\.")


def _has_medusa(source: HeadSource) -> bool:
    """Return whether a checkpoint has Medusa heads: by its keys, its file or its tensors."""
    fields = source.fields
    return (
        fields.raw.get("model_type") == "medusa"
        or "medusa_num_heads" in fields
        or any(path.name.startswith("medusa_lm_head") for path in source.files)
        or any(_PREFIX.match(name) for name in source.shapes)
    )


@dataclass(frozen=True)
class MedusaShape(StatelessShape):
    """Sizes of Medusa heads.

    lm_heads: one for each head, one for all of them, or the target's.
    draft_vocab_size: number of tokens that can be drafted. stored_vocab_size: rows of the stored
    output heads, of which `token_map` selects those that are used.
    """

    num_layers: int
    has_bias: bool
    lm_heads: Literal["own", "shared", "target"]
    stored_vocab_size: int
    has_token_map: bool

    def tensors(self) -> dict[str, Shape]:
        """See HeadShape."""
        shapes: dict[str, Shape] = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                shapes[f"blocks.{head}.{layer}.weight"] = (self.hidden_size, self.hidden_size)
                if self.has_bias:
                    shapes[f"blocks.{head}.{layer}.bias"] = (self.hidden_size,)
        for name in self.lm_head_names:
            shapes[name] = (self.stored_vocab_size, self.hidden_size)
        if self.has_token_map:
            shapes["token_map"] = (self.draft_vocab_size,)
        return shapes

    @property
    def lm_head_names(self) -> tuple[str, ...]:
        """The tensors of the output heads; none if the target's is used."""
        match self.lm_heads:
            case "own":
                return tuple(f"lm_heads.{head}.weight" for head in range(self.num_heads))
            case "shared":
                return ("lm_head.weight",)
            case "target":
                return ()

    @property
    def output_heads(self) -> OutputHeads | None:
        """See HeadShape."""
        if not self.lm_head_names:
            return None
        return OutputHeads(
            self.lm_head_names,
            "token_map",
            self.has_token_map,
            self._with_tokens,
            is_whole=self.stored_vocab_size != self.draft_vocab_size,
        )

    def _with_tokens(self, count: int) -> MedusaShape:
        return replace(self, draft_vocab_size=count, stored_vocab_size=count, has_token_map=True)

    def summary(self) -> str:
        """See HeadShape."""
        return (
            f"{self.num_heads} heads of {self.num_layers} layers, {self.lm_heads} output heads for "
            f"{self.draft_vocab_size} tokens"
        )


def read_medusa(source: HeadSource, target: ModelConfig) -> Reading:
    """Read any layout of Medusa heads; counts of heads and layers are those of the tensors."""
    fields = source.fields
    fields.require_equal("hidden_size", target.hidden_size, "the target")
    fields.require_equal("vocab_size", target.vocab_size, "the target")
    if "medusa" in fields:
        source = source.restricted(lambda name: bool(_PREFIX.match(name)))
    names = source.renamed(_canonical)
    num_heads, lm_heads = names.count("blocks"), _kind_of_lm_heads(names)
    if lm_heads == "shared" and "lm_head.weight" not in names:
        names = source.renamed(lambda name: _shared_name(_canonical(name)))
    if num_heads == 0:
        raise UnsupportedModelError(f"{source.directory} has no tensors of Medusa heads")
    stored = target.vocab_size
    if lm_heads != "target":
        first = "lm_head.weight" if lm_heads == "shared" else "lm_heads.0.weight"
        stored, _ = names.shape(first, 2)
    has_map = "token_map" in names
    (draft_vocab_size,) = names.shape("token_map", 1) if has_map else (target.vocab_size,)
    shape = MedusaShape(
        hidden_size=target.hidden_size,
        num_heads=num_heads,
        num_layers=names.count("blocks.0"),
        has_bias="blocks.0.0.bias" in names,
        lm_heads=lm_heads,
        draft_vocab_size=draft_vocab_size,
        stored_vocab_size=stored if stored == draft_vocab_size else target.vocab_size,
        has_token_map=has_map,
    )
    target_name = fields.optional_text("base_model_name_or_path")
    return Reading(f"Medusa ({_layout(source)})", shape, names, target_name)


def _layout(source: HeadSource) -> str:
    if any("blocks." in name for name in source.shapes):
        return "vLLM"
    return "ModelOpt" if "medusa" in source.fields else "FasterDecoding"


def _canonical(stored: str) -> str:
    name = _PREFIX.sub("", stored, count=1)
    for pattern, replacement in _RENAMES:
        if pattern.fullmatch(name):
            return pattern.sub(replacement, name)
    return name


def _shared_name(name: str) -> str:
    return "lm_head.weight" if name == "lm_heads.0.weight" else name


def _kind_of_lm_heads(names: TensorNames) -> Literal["own", "shared", "target"]:
    """Return how many output heads are stored; vLLM stores a shared one as the first of several."""
    if "lm_head.weight" in names:
        return "shared"
    match names.count("lm_heads"):
        case 0:
            return "target"
        case 1 if names.count("blocks") > 1:
            return "shared"
        case _:
            return "own"


MEDUSA = HeadFormat(read_medusa, _has_medusa, keys=("medusa_num_heads",), order=4)
