"""Hydra heads (Ankner et al. 2024): Medusa-like heads that also read the drafted tokens.

Head i reads the target's last hidden state and the embeddings of the i + 1 tokens after it. The
architecture `mlp` with grounded heads is supported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.shape import HeadFormat, Reading, StatelessShape
from specdec.models.heads.formats.source import HeadSource, Shape
from specdec.types.errors import UnsupportedModelError

_RENAMES = (
    (
        re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)"),
        r"blocks.\1.\2.\3.\4",
    ),
    (re.compile(r"(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)"), r"blocks.\1.\2.\3.\4"),
    (re.compile(r"hydra_lm_head\.(\d+)\.(weight|bias)"), r"lm_heads.\1.\2"),
    (re.compile(r"(\d+)\.\d+\.(weight|bias)"), r"lm_heads.\1.\2"),
)
_PREFIX = re.compile(r"(?:model\.)?hydra_head\.")


@dataclass(frozen=True)
class HydraShape(StatelessShape):
    """Sizes of Hydra heads. has_head_bias: of the output heads."""

    num_layers: int
    has_head_bias: bool

    def input_size(self, head: int, layer: int) -> int:
        """Return the width of the input of a layer."""
        return (head + 2) * self.hidden_size if layer == 0 else self.hidden_size

    def tensors(self) -> dict[str, Shape]:
        """See HeadShape."""
        hidden, shapes = self.hidden_size, dict[str, Shape]()
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                for name in ("linear",) if layer else ("linear", "res_connection"):
                    prefix = f"blocks.{head}.{layer}.{name}"
                    shapes[f"{prefix}.weight"] = (hidden, self.input_size(head, layer))
                    shapes[f"{prefix}.bias"] = (hidden,)
            shapes[f"lm_heads.{head}.weight"] = (self.draft_vocab_size, hidden)
            if self.has_head_bias:
                shapes[f"lm_heads.{head}.bias"] = (self.draft_vocab_size,)
        return shapes

    def summary(self) -> str:
        """See HeadShape."""
        return f"{self.num_heads} grounded heads of {self.num_layers} layers"


def read_hydra(source: HeadSource, target: ModelConfig) -> Reading:
    """Read Hydra heads; counts of heads and layers are those of the tensors."""
    fields = source.fields
    fields.require_equal("hidden_size", target.hidden_size, "the target")
    fields.require_equal("vocab_size", target.vocab_size, "the target")
    if fields.text("hydra_head_arch", "mlp") != "mlp":
        raise fields.error("hydra_head_arch", "mlp; other architectures are not supported")
    if not fields.flag("grounded_heads", default=True):
        raise fields.error("grounded_heads", "true; other heads are not supported")
    names = source.renamed(_canonical)
    num_heads = names.count("blocks")
    if num_heads == 0:
        raise UnsupportedModelError(f"{source.directory} has no tensors of Hydra heads")
    shape = HydraShape(
        hidden_size=target.hidden_size,
        num_heads=num_heads,
        num_layers=names.count("blocks.0"),
        draft_vocab_size=target.vocab_size,
        has_head_bias="lm_heads.0.bias" in names,
    )
    return Reading("Hydra", shape, names, fields.optional_text("base_model_name_or_path"))


def _canonical(stored: str) -> str:
    name = _PREFIX.sub("", stored, count=1)
    for pattern, replacement in _RENAMES:
        if pattern.fullmatch(name):
            return pattern.sub(replacement, name)
    return name


def _is_hydra(source: HeadSource) -> bool:
    return "hydra_num_heads" in source.fields


HYDRA = HeadFormat(read_hydra, _is_hydra, keys=("hydra_num_heads",), order=3)
