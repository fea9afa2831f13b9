"""Format of bigram heads: a score of each pair of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.shape import HeadFormat, Reading, StatelessShape
from specdec.models.heads.formats.source import HeadSource, Shape


@dataclass(frozen=True)
class BigramShape(StatelessShape):
    """Sizes of a table; num_heads: most draft tokens."""

    def tensors(self) -> dict[str, Shape]:
        """See HeadShape."""
        return {"scores.weight": (self.draft_vocab_size, self.draft_vocab_size)}

    def summary(self) -> str:
        """See HeadShape."""
        return f"pairs of {self.draft_vocab_size} tokens"


def _read(source: HeadSource, target: ModelConfig) -> Reading:
    depth = source.fields.count("bigram_depth")
    shape = BigramShape(target.hidden_size, depth, draft_vocab_size=target.vocab_size)
    return Reading("bigrams", shape, source.renamed(str))


BIGRAM = HeadFormat(_read, lambda source: "bigram_depth" in source.fields, keys=("bigram_depth",))
