"""How a dimension is divided among ranks."""

from __future__ import annotations

from itertools import pairwise


def partition(total: int, parts: int) -> tuple[range, ...]:
    """Divides range(total) into `parts` contiguous ranges whose lengths differ by at most one."""
    bounds = [part * total // parts for part in range(parts + 1)]
    return tuple(range(start, end) for start, end in pairwise(bounds))
