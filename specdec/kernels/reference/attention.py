"""Arguments of paged attention beside queries, keys and values, and its plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """Rotations of a batch's tokens; computed once per forward pass, used by every layer."""

    cos: Tensor  # [T, 1, rotary_dim]
    sin: Tensor  # [T, 1, rotary_dim], its first half negated

    def apply_(self, x: Tensor) -> None:
        """Rotate the first rotary_dim dimensions of x [T, heads, head_dim] in place."""
        x = x[..., : self.cos.shape[-1]]
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        x.mul_(self.cos).addcmul_(swapped, self.sin)


class Norm(Protocol):
    """Root mean square norm over the last dimension."""

    weight: Tensor  # [head_dim]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized x [..., head_dim]."""
        ...


class QueryKeyNorms(NamedTuple):
    """Norms of each head of queries and of keys, before the rotation."""

    query: Norm
    key: Norm


@dataclass(frozen=True)
class Visible:
    """The part of its context that a query sees.

    window: number of visible tokens, its own included; None for no limit. kv_start: slots before
    it have no KV; no token of a batch is there. num_ahead: tokens after its
    own that it sees, as far as the context has them; 0 but in a DeviceBatch. chunk: size of the
    chunks of positions, of which it sees its own alone; None for no chunks.
    """

    window: int | None = None
    kv_start: int = 0
    num_ahead: int = 0
    chunk: int | None = None

    def first_position(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        first = 0 if self.window is None else position - self.window + 1
        if self.chunk is not None:
            first = max(first, position - position % self.chunk)
        return max(first, 0)


ALL_BEFORE = Visible()


class AttentionPlan(Protocol):
    """The part of a batch's attention that is the same for all layers, of one implementation."""

    @property
    def slot_mapping(self) -> Tensor:
        """The slot of each token's KV, [T] int32 or int64."""
        ...
