"""Verification where nothing is drawn: at temperature 0 every lossless verifier does the same."""

from __future__ import annotations

from collections.abc import Sequence


def verify_greedy(best: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The drafts of each sequence that are the target's best tokens, and the best one behind them.

    best: [sum of len(draft) + 1], the best token after the base token and after each draft token.
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
