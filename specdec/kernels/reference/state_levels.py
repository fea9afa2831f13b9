"""The order in which a recurrence runs inputs of several rows, some of which end in trees.

Inputs that do not depend on each other run at once: one of each chain, and all nodes of a depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.types.drafts.draft_tree import BASE, Parents, depths


class SteppedRow(NamedTuple):
    """Inputs of a sequence that run one by one: a chain, then the nodes of a tree after it.

    first: place of the first one. num_committed: of the chain, after which the state is committed;
    below 1 for none. parents: of the nodes; none without a tree.
    """

    slot: int
    first: int
    num_chain: int
    num_committed: int
    parents: Parents

    @property
    def num_levels(self) -> int:
        return self.num_chain + max(depths(self.parents), default=0)


class Commit(NamedTuple):
    """A state of a level, by its index, that a slot keeps."""

    state: int
    slot: int


@dataclass(frozen=True)
class Level:
    """Inputs that run at once, n of them.

    places: of the inputs, [n]. sources: index of the state before each in the level before, or in
    the slots of all rows, [n]; None for the first n.
    """

    places: Tensor
    sources: Tensor | None
    commits: Sequence[Commit]


@dataclass
class _Level:
    places: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)

    def add(self, place: int, source: int) -> int:
        """Add an input; return the index of the state after it."""
        self.places.append(place)
        self.sources.append(source)
        return len(self.places) - 1


@dataclass(frozen=True)
class StateLevels:
    """The slots with whose states rows begin, and their levels in order."""

    slots: Sequence[int]
    levels: Sequence[Level]

    @classmethod
    def of(cls, rows: Iterable[SteppedRow], device: torch.device) -> StateLevels:
        """Lay out rows; where none has a tree, the states of a level are the first ones before."""
        longest_first = sorted(rows, key=lambda row: -row.num_levels)
        levels = [_Level() for _ in range(longest_first[0].num_levels if longest_first else 0)]
        for index, row in enumerate(longest_first):
            _add_row(levels, row, index)
        found = [_on_device(level, device) for level in levels]
        return cls([row.slot for row in longest_first], found)


def _add_row(levels: Sequence[_Level], row: SteppedRow, source: int) -> None:
    for step in range(row.num_chain):
        source = levels[step].add(row.first + step, source)
        if step + 1 == row.num_committed:
            levels[step].commits.append(Commit(source, row.slot))
    after = {BASE: source}
    for node, (parent, depth) in enumerate(zip(row.parents, depths(row.parents), strict=True)):
        place = row.first + row.num_chain + node
        after[node] = levels[row.num_chain + depth - 1].add(place, after[parent])


def _on_device(level: _Level, device: torch.device) -> Level:
    places, sources = level.places, level.sources
    is_first = sources == list(range(len(sources)))
    return Level(
        torch.tensor(places, device=device),
        None if is_first else torch.tensor(sources, device=device),
        level.commits,
    )
