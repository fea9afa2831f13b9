"""Shape of heads whose layers read one projection of the token's embedding and the feature.

EAGLE-1 and 2, and MTP layers: x = W [norm(embedding); norm(feature)] + b, decoder layers, and an
output head, usually the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.models.heads.formats.layers import describe_windows, layer_shapes
from specdec.models.heads.formats.shape import KvShape
from specdec.models.heads.formats.source import Shape


@dataclass(frozen=True)
class FusedShape(KvShape):
    """Sizes and switches of such a head.

    has_bias: of the projection. normalizes_inputs: of the projection. is_feature_first: in the
    concatenation. has_first_norm: of the first layer, before attention. has_final_norm: before the
    output head. recycles_norm: the feature of a drafted token is after that norm.
    """

    has_bias: bool = False
    normalizes_inputs: bool = False
    is_feature_first: bool = False
    has_first_norm: bool = True
    has_final_norm: bool = False
    recycles_norm: bool = False

    def tensors(self) -> dict[str, Shape]:
        """See HeadShape."""
        hidden = self.decoder.hidden_size
        shapes: dict[str, Shape] = {"fc.weight": (hidden, 2 * hidden)}
        if self.has_bias:
            shapes["fc.bias"] = (hidden,)
        if self.normalizes_inputs:
            shapes["token_norm.weight"] = shapes["feature_norm.weight"] = (hidden,)
        for index in range(self.decoder.num_layers):
            has_norm = self.has_first_norm or index > 0
            shapes |= layer_shapes(self.decoder, index, has_input_norm=has_norm)
        if self.has_final_norm:
            shapes["norm.weight"] = (hidden,)
        return shapes | self.vocabulary_tensors()

    def summary(self) -> str:
        """See HeadShape."""
        parts = [f"layers: {self.decoder.num_layers}", describe_windows(self.decoder)]
        parts.append("feature before embedding" if self.is_feature_first else "embedding first")
        parts += ["inputs normalized"] * self.normalizes_inputs
        parts.append("final norm" if self.has_final_norm else "no final norm")
        parts += ["normalized output recycled"] * self.recycles_norm
        parts.append(f"embedding {'own' if self.has_embedding else 'of the target'}")
        parts.append(f"output head {'own' if self.has_lm_head else 'of the target'}")
        return ", ".join(parts)
