"""Shapes of draft trees that are fitted to a head's probabilities by depth and rank.

Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3 and appendix on optimized trees). Trees that
grow by value are in `device.device_growth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from specdec.types.drafts.static_tree import Choice


def fitted_choices(
    rates: Sequence[Sequence[float]], num_nodes: int, *, with_chain: bool = False
) -> list[Choice]:
    """Return the choices with the most expected accepted tokens, in any order.

    A greedy choice is optimal: no node is accepted more often than its parent.

    rates: by depth and rank, the probability that the token is the target's, ranks of a depth in
    descending order; a rank with rate 0 is never chosen. with_chain: whether the chain of first
    ranks is always among the choices, so that the tree accepts at least what this chain does.
    """
    chain = [(0,) * depth for depth in range(1, len(rates) + 1)] if with_chain else []
    chosen: list[Choice] = chain[:num_nodes]
    heap: list[tuple[float, Choice]] = []

    def offer(choice: Choice, parent_rate: float) -> None:
        depth, rank = len(choice) - 1, choice[-1]
        if depth < len(rates) and rank < len(rates[depth]) and rates[depth][rank] > 0:
            heappush(heap, (-parent_rate * rates[depth][rank], choice))

    offer((0,), 1.0)
    while heap and len(chosen) < num_nodes:
        negative, choice = heappop(heap)
        if choice not in chain:
            chosen.append(choice)
        offer((*choice, 0), -negative)
        *before, rank = choice
        offer((*before, rank + 1), -negative / rates[len(before)][rank])
    return chosen
