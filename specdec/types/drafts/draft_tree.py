"""Trees of draft tokens: several continuations of a text that the target verifies in one pass.

A tree is its *parents*: for each draft token, or *node*, the index of the node that it follows, or
BASE for the last known token. A parent stands before its children, so that the first nodes of a
tree are a tree as well. Node i of a sequence takes the i-th KV slot after the base, while its
position follows from its *depth*: 1 for a child of the base. A chain is a tree whose parents are
None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

BASE = -1
"""The parent of a node that follows the last known token."""

MAX_TREE_NODES = 64
"""Most nodes of a tree: ancestors are the bits of a 64-bit word."""

Parents = Sequence[int]


class TreeSize(NamedTuple):
    """Size of a tree: nodes, and how many of them may follow each other; zeros for no tree."""

    num_nodes: int
    depth: int


class TokenTree(NamedTuple):
    """Draft tokens of a tree, and their parents."""

    token_ids: Sequence[int]
    parents: Parents


def is_chain(parents: Parents) -> bool:
    """Return whether each node follows the one before."""
    return all(parent == index - 1 for index, parent in enumerate(parents))


def require_tree(parents: Parents) -> None:
    """Assert that there are at most MAX_TREE_NODES, each after its parent."""
    assert len(parents) <= MAX_TREE_NODES, f"a tree of {len(parents)} nodes"
    assert all(BASE <= parent < index for index, parent in enumerate(parents)), parents


def depths(parents: Parents) -> list[int]:
    """Return the depth of each node, from 1 up."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == BASE else found[parent] + 1)
    return found


def ancestors(parents: Parents) -> list[int]:
    """Return the nodes on the path to each node as bits, bit i for node i, itself included."""
    found: list[int] = []
    for index, parent in enumerate(parents):
        found.append(1 << index | (0 if parent == BASE else found[parent]))
    return found


def signed_words(masks: Sequence[int]) -> list[int]:
    """Return masks of 64 bits as the signed integers with the same bits."""
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


def paths(parents: Parents) -> list[tuple[int, ...]]:
    """Return the nodes from the base to each node, itself last."""
    found: list[tuple[int, ...]] = []
    for index, parent in enumerate(parents):
        found.append((index,) if parent == BASE else (*found[parent], index))
    return found


def path_of(token_ids: Sequence[int], parents: Parents, text: Sequence[int]) -> list[int]:
    """Return the nodes whose tokens begin `text`; of equal siblings the first one.

    token_ids: of the nodes.
    """
    path: list[int] = []
    parent = BASE
    for token in text:
        found = _child(token_ids, parents, parent, token)
        if found is None:
            break
        path.append(found)
        parent = found
    return path


def walk(sampled: Sequence[int], token_ids: Sequence[int], parents: Parents) -> tuple[int, ...]:
    """Return the tokens from the base on while each is a child of the one before, and the next.

    sampled: [num_nodes + 1], the target's token after the base and after each node.
    """
    output: list[int] = []
    node: int | None = BASE
    while node is not None:
        output.append(sampled[node + 1])
        node = _child(token_ids, parents, node, output[-1])
    return tuple(output)


def _child(token_ids: Sequence[int], parents: Parents, parent: int, token: int) -> int | None:
    """Return the first child of a node that has `token`."""
    for index in range(parent + 1, len(parents)):
        if parents[index] == parent and token_ids[index] == token:
            return index
    return None


def first_path(parents: Parents) -> list[int]:
    """Return the path of first children, which proposers make their most likely continuation."""
    path: list[int] = []
    for index, parent in enumerate(parents):
        if parent == (path[-1] if path else BASE):
            path.append(index)
    return path


def chain_of(token_ids: tuple[int, ...], parents: Parents | None) -> tuple[int, ...]:
    """Return the tokens on the first path of a draft; all of them without `parents`."""
    if parents is None:
        return token_ids
    return tuple(token_ids[node] for node in first_path(parents))


def nodes_within(parents: Parents, depth: int) -> list[int]:
    """Return the nodes of at most `depth`, which are a tree."""
    return [node for node, own in enumerate(depths(parents)) if own <= depth]


def growth_width(num_nodes: int, depth: int) -> int:
    """Return how many nodes a tree grows at on each level, and how many children each gets there.

    num_nodes, depth: of the tree, which keeps the best nodes only. With KV for each of them there
    are at most MAX_TREE_NODES.
    """
    return min(-(-num_nodes // depth), MAX_TREE_NODES // max(1, depth - 1))


def num_growth_slots(num_nodes: int, depth: int) -> int:
    """Return how many nodes run while a tree grows: each level but the last."""
    return growth_width(num_nodes, depth) * (depth - 1)


def subtree(parents: Parents, nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of the tree of some nodes, in order, which include their ancestors."""
    places = {BASE: BASE} | {node: place for place, node in enumerate(nodes)}
    return tuple(places[parents[node]] for node in nodes)


def wanted_part(
    token_ids: tuple[int, ...], parents: Parents | None, num_nodes: int, depth: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the tokens of a draft that are wanted, and their tree; None for a chain.

    They are `num_nodes` at most, of which `depth` follow each other. Where these are as many, only
    the first path is wanted.
    """
    if parents is None or num_nodes <= depth:
        return chain_of(token_ids, parents)[:depth], None
    nodes = nodes_within(parents, depth)[:num_nodes]
    own = subtree(parents, nodes)
    return tuple(token_ids[node] for node in nodes), None if is_chain(own) else own


def merged(continuations: Sequence[Sequence[int]], num_nodes: int) -> tuple[list[int], list[int]]:
    """Merge continuations of one text into a tree of at most `num_nodes`; return (tokens, parents).

    Common beginnings are one path. Earlier continuations come first, so that a shortage of nodes
    shortens the last ones.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for parent_and_token in _edges(continuations, children):
        if len(token_ids) == num_nodes:
            break
        children[parent_and_token] = len(token_ids)
        parents.append(parent_and_token[0])
        token_ids.append(parent_and_token[1])
    return token_ids, parents


def _edges(
    continuations: Sequence[Sequence[int]], children: dict[tuple[int, int], int]
) -> Iterator[tuple[int, int]]:
    """Yield (parent, token) of each new node; the caller adds it to `children`."""
    for tokens in continuations:
        parent = BASE
        for token in tokens:
            if (parent, token) not in children:
                yield parent, token
            parent = children[parent, token]
