"""Greedy verification: at temperature 0 all lossless verifiers are equivalent."""

from __future__ import annotations

from collections.abc import Sequence


def verify_greedy(best: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the draft tokens of each sequence that are the argmax, and the argmax after them.

    best: [sum of len(draft) + 1], the argmax after the base token and after each draft token.
    """
    verified, start = [], 0
    for draft in drafts:
        last = start
        for token in draft:
            if token != best[last]:
                break
            last += 1
        verified.append(tuple(best[start : last + 1]))
        start += len(draft) + 1
    return verified
