"""Layers that drafters have in common, and the map of a reduced vocabulary in their files."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels import Rotation


class RMSNorm(nn.RMSNorm):
    """Root mean square normalization in float32, whatever the precision of the products is."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, [..., size] float32."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps)


def linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a layer without bias, with random weights that keep the variance."""
    layer = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(layer.weight, std=in_features**-0.5)
    return layer


def rows_product(x: Tensor, weight: Tensor, rows: Tensor | None) -> Tensor:
    """Return x times some rows of a weight, [..., n]; rows: [n] int64, None for all of them."""
    return F.linear(x, weight if rows is None else weight.index_select(0, rows))


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Return x [N, heads, head_dim] rotated, as `Rotation.apply_` does in place."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * rotation.cos + swapped * rotation.sin).to(x.dtype)


def draft_id_tensors(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return the tensors that map draft tokens and the target's, as in EAGLE-3's files.

    token_ids: the target's id of each draft token, ascending, [V] int64. vocab_size: the target's.
    """
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": is_drafted}
