"""Sequences in a shuffled paged cache, with attention by its definition."""

from dataclasses import dataclass, field

import torch

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.types.drafts.draft_tree import depths, paths
from specdec.types.sharding import HeadShard


@dataclass(frozen=True)
class Case:
    """Shapes of a batch. lengths: (context, queries) of each sequence; trees: parents by index."""

    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    kv_start: int = 0
    trees: dict[int, tuple[int, ...]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    soft_cap: float | None = None
    latent_rank: int | None = None
    has_sinks: bool = False

    @property
    def kv_parts(self):
        return 2 if self.latent_rank is None else 1

    @property
    def heads(self):
        return HeadShard.all_ranks(self.num_heads, self.kv_heads, 1)[0]


class Pages:
    """Random queries and KV of a case, whose blocks are shuffled."""

    def __init__(self, case, seed=0):
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        size = case.block_size
        counts = [-(-context // size) for context, _ in case.lengths]
        free, *blocks = torch.randperm(sum(counts) + 1, generator=generator).split([1, *counts])
        self.free_slot, tables = int(free) * size, blocks
        self.slots = [
            table[torch.arange(context) // size] * size + torch.arange(context) % size
            for table, (context, _) in zip(tables, case.lengths, strict=True)
        ]
        chunks = [
            Chunk([0] * queries, context - queries, table.tolist(), case.trees.get(index))
            for index, (table, (context, queries)) in enumerate(
                zip(tables, case.lengths, strict=True)
            )
        ]
        self.batch = ForwardBatch(chunks, size)
        shape = ((sum(counts) + 1) * size, case.kv_parts, case.kv_heads, case.head_dim)
        self.cache = torch.randn(shape, generator=generator).to(case.dtype)
        tokens = self.batch.num_tokens
        query_shape = (tokens, case.num_heads, case.head_dim)
        self.query = torch.randn(query_shape, generator=generator).to(case.dtype)
        self.sinks = None
        if case.has_sinks:
            self.sinks = torch.randn(case.num_heads, generator=generator).to(case.dtype)

    @property
    def own_kv(self):
        """KV of the batch's tokens, [T, kv_parts, kv_heads, head_dim]."""
        return self.cache[torch.from_numpy(self.batch.slot_mapping).long()]

    def expected(self):
        """Attend with each query alone, in float64."""
        outputs, token = [], 0
        for index, (slots, (context, queries)) in enumerate(
            zip(self.slots, self.case.lengths, strict=True)
        ):
            for place in range(context - queries, context):
                seen = self._seen(index, context, place)
                pages = self.cache[slots[seen]].double()
                keys, values = pages[:, 0], pages[:, -1, :, -(self.case.latent_rank or 0) :]
                outputs.append(self._attend(self.query[token].double(), keys, values))
                token += 1
        return torch.stack(outputs)

    def _seen(self, index, context, place):
        """Return the places of a sequence that the query at a place sees."""
        case = self.case
        parents = case.trees.get(index, ())
        first_node = context - len(parents)
        positions = [*range(first_node), *(first_node - 1 + depth for depth in depths(parents))]
        seen = list(range(min(place + 1, first_node)))
        if place >= first_node:
            seen += [first_node + node for node in paths(parents)[place - first_node]]
        earliest = 0 if case.window is None else positions[place] - case.window + 1
        return [other for other in seen if positions[other] >= max(earliest, case.kv_start)]

    def _attend(self, query, keys, values):
        repeats = self.case.num_heads // self.case.kv_heads
        keys, values = (each.repeat_interleave(repeats, dim=1) for each in (keys, values))
        scores = torch.einsum("hd,shd->hs", query, keys) / self.case.head_dim**0.5
        if self.case.soft_cap is not None:
            scores = self.case.soft_cap * torch.tanh(scores / self.case.soft_cap)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(values)]
        return torch.einsum("hs,shd->hd", weights, values)
