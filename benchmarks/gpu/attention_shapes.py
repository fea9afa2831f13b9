"""Batches of attention with which the kernels of a device are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.types.sharding import HeadShard

_TREE = (-1, -1, 0, 0, 1, 2)


@dataclass(frozen=True)
class Shape:
    """A batch of attention. lengths: context and query of each sequence.

    latent_rank: of latents that all heads share. layout: whether the host plans it, or the device:
    of fixed shape, as in a graph of decodes, or ragged, as in one of steps with prompts.
    """

    lengths: Sequence[tuple[int, int]]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    tree: tuple[int, ...] | None = None
    latent_rank: int | None = None
    has_sinks: bool = False
    layout: Literal["host", "fixed", "ragged"] = "host"

    @property
    def shard(self) -> HeadShard:
        """All heads, on one rank."""
        (shard,) = HeadShard.all_ranks(self.heads, self.kv_heads, 1)
        return shard


SHAPES = {
    "decode": Shape(((1000, 1),)),
    "decode of 40 sequences": Shape(tuple((300 + 13 * i, 1) for i in range(40))),
    "decode after 9000 tokens": Shape(((9000, 1), (8192, 1))),
    "chains of drafts": Shape(((1000, 6), (257, 4), (5, 5), (40, 1))),
    "9 tokens each": Shape(((700, 9),) * 3),
    "tree of drafts": Shape(((300, 7), (50, 7)), tree=_TREE),
    "prefill": Shape(((300, 300), (700, 200), (90, 1))),
    "window": Shape(((900, 1), (600, 5), (200, 200)), window=100),
    "soft cap": Shape(((500, 1), (64, 40)), softcap=30.0),
    "graph of decodes": Shape(((1000, 1), (17, 1)), layout="fixed"),
    "graph of drafts": Shape(((1000, 5), (300, 5), (17, 5)), layout="fixed"),
    "graph of 40 sequences": Shape(((520, 3),) * 40, layout="fixed"),
    "graph with prompts": Shape(((300, 300), (700, 200), (90, 1), (33, 6)), layout="ragged"),
    "graph with prompts, window": Shape(((900, 1), (40, 17)), window=100, layout="ragged"),
    "heads of 64, groups of 3": Shape(((700, 1), (300, 5)), 9, 3, 64),
    "heads of 80": Shape(((300, 4), (100, 100)), 8, 8, 80),
    "heads of 96": Shape(((300, 4), (100, 100)), 8, 8, 96),
    "heads of 256, groups of 2": Shape(((600, 4), (100, 100)), 16, 8, 256, softcap=50.0),
    "pages of 128": Shape(((1000, 1), (300, 20)), block_size=128),
    "groups of 8": Shape(((1000, 1), (300, 6)), 64, 8),
    "latents, 16 heads": Shape(((1000, 1), (300, 6)), 16, 1, 576, latent_rank=512),
    "latents, 128 heads": Shape(((1000, 1), (300, 3)), 128, 1, 576, latent_rank=512),
    "latents of 40 sequences": Shape(((520, 3),) * 40, 16, 1, 576, latent_rank=512),
    "latents, tree": Shape(((300, 7), (50, 7)), 16, 1, 576, tree=_TREE, latent_rank=512),
    "latents, prefill": Shape(((300, 300), (90, 1)), 16, 1, 576, latent_rank=512),
    "latents, graph": Shape(((1000, 5), (17, 5)), 16, 1, 576, latent_rank=512, layout="fixed"),
    "sinks": Shape(((1000, 1), (300, 6), (90, 90)), 64, 8, 64, has_sinks=True),
    "sinks, window": Shape(((1000, 1), (300, 6)), 64, 8, 64, window=128, has_sinks=True),
}
ALL_DTYPES = (
    *("decode", "chains of drafts", "prefill", "graph of drafts", "graph with prompts"),
    *("tree of drafts", "latents, 16 heads", "sinks"),
)
"""Shapes that are checked in every data type; the others in bfloat16."""
