"""MLP speculators (Wertheimer et al. 2024): a recurrence on the target's last hidden state.

The layout is that of IBM's accelerators, `speculator.{emb,proj,head,ln}.i`.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.shape import HeadFormat, Reading, StatelessShape
from specdec.models.heads.formats.source import MAX_MODULES, HeadSource, Shape


@dataclass(frozen=True)
class MlpSpeculatorShape(StatelessShape):
    """Sizes of an MLP speculator.

    hidden_size: `emb_dim`, the target's. inner_size: width of the state. num_heads: `n_predict`.
    ties_weights: all heads share the weights of the first, except for the first projection.
    scales_input: normalize the target's hidden state first.
    """

    inner_size: int
    ties_weights: bool
    scales_input: bool

    @property
    def num_stored_heads(self) -> int:
        """The number of heads with weights."""
        return 1 if self.ties_weights else self.num_heads

    @property
    def num_projections(self) -> int:
        return min(2, self.num_heads) if self.ties_weights else self.num_heads

    def projection(self, index: int) -> tuple[int, int]:
        """Return the shape of projection `index`."""
        return self.inner_size, self.inner_size if index else self.hidden_size

    def tensors(self) -> dict[str, Shape]:
        """See HeadShape."""
        vocab, inner = self.draft_vocab_size, self.inner_size
        shapes: dict[str, Shape] = {}
        for head in range(self.num_projections):
            shapes[f"proj.{head}.weight"] = self.projection(head)
        for head in range(self.num_stored_heads):
            shapes[f"emb.{head}.weight"] = (vocab, inner)
            shapes[f"head.{head}.weight"] = (vocab, inner)
            shapes[f"ln.{head}.weight"] = shapes[f"ln.{head}.bias"] = (inner,)
        return shapes

    def summary(self) -> str:
        """See HeadShape."""
        switches = [f"{self.num_heads} heads of width {self.inner_size}"]
        switches += ["tied weights"] * self.ties_weights
        switches += ["input scaled"] * self.scales_input
        return ", ".join(switches)


def read_mlp_speculator(source: HeadSource, target: ModelConfig) -> Reading:
    """Read an MLP speculator. Tied weights may be stored once or once for each head."""
    fields = source.fields
    if fields.text("method", "sum_rnn") != "sum_rnn":
        raise fields.error("method", "sum_rnn; other recurrences are not supported")
    fields.require_equal("emb_dim", target.hidden_size, "the target (hidden_size)")
    fields.require_equal("vocab_size", target.vocab_size, "the target")
    inner = fields.count("inner_dim", 0, least=0)
    shape = MlpSpeculatorShape(
        hidden_size=target.hidden_size,
        inner_size=inner or target.hidden_size,
        num_heads=fields.count("n_predict", most=MAX_MODULES),
        draft_vocab_size=target.vocab_size,
        ties_weights=fields.flag("tie_weights", default=False),
        scales_input=fields.flag("scale_input", default=False),
    )
    names = source.renamed(lambda name: name.removeprefix("speculator."))
    return Reading(
        "MLP speculator",
        shape,
        names,
        ignored=lambda name: _is_copy_of_tied(shape, name),
    )


def _is_copy_of_tied(shape: MlpSpeculatorShape, name: str) -> bool:
    """Return whether a tensor is a copy that a file with tied weights may store."""
    kind, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    known = kind in {"emb", "head", "ln", "proj"} and index.isdigit()
    return shape.ties_weights and known and int(index) < shape.num_heads


def _is_mlp_speculator(source: HeadSource) -> bool:
    return source.fields.raw.get("model_type") == "mlp_speculator"


MLP_SPECULATOR = HeadFormat(read_mlp_speculator, _is_mlp_speculator, order=2)
