"""Tests of the suffix tree against plain counting, after any additions and removals."""

from array import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from specdec.speculation.proposers.suffix_tree import OnlineSuffixTree, SuffixTree

DEPTHS = st.integers(1, 6)
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(lambda ids: array("i", ids))


def add(tree, text):
    for start in range(len(text)):
        tree.add(text, start)


def remove(tree, text):
    for start in range(len(text)):
        tree.remove(text, start)


def pieces(tree):
    """Return the count of every path that ends with a node: the whole content of the tree."""
    found, paths = {}, [(0, ())]
    while paths:
        node, prefix = paths.pop()
        for child in (tree._children[node] or {}).values():
            label = tree._texts[child][tree._starts[child] : tree._ends[child]]
            piece = prefix + tuple(label)
            paths.append((child, piece))
            found[piece] = tree._counts[child]
    return found


def counted(texts, depth):
    """Return how often each piece of up to `depth` tokens occurs in the texts."""
    counts = Counter()
    for text in texts:
        for start in range(len(text)):
            for stop in range(start + 1, min(start + depth, len(text)) + 1):
                counts[tuple(text[start:stop])] += 1
    return counts


def check_equal(tree, texts):
    """Check that the tree has the pieces, counts and number of nodes of a new one."""
    tree.check_integrity()
    expected = counted(texts, tree.max_depth)
    for piece, count in pieces(tree).items():
        assert expected[piece] == count
    assert all(tree.find(array("i", piece)) for piece in expected)
    fresh = SuffixTree(tree.max_depth)
    for text in texts:
        add(fresh, text)
    assert pieces(fresh) == pieces(tree)
    assert fresh.num_nodes == tree.num_nodes


@given(DEPTHS, st.lists(st.tuples(TEXTS, st.integers(0, 3)), min_size=1, max_size=10))
def test_counts_after_additions_and_removals(depth, steps):
    tree, kept = SuffixTree(depth), []
    for text, which in steps:
        if which < len(kept):
            remove(tree, kept.pop(which))
        else:
            add(tree, text)
            kept.append(text)
        check_equal(tree, kept)
    for text in kept:
        remove(tree, text)
    assert tree.num_nodes == 0


@given(DEPTHS, st.lists(st.integers(0, 2), max_size=40))
def test_a_text_that_grows(depth, tokens):
    text = OnlineSuffixTree(depth)
    for length, token in enumerate(tokens, start=1):
        text.append(token)
        assert text.num_matched == longest_that_came_before(tokens[:length], depth)
        text.tree.check_integrity()
        num_added = length - text.num_matched
        for piece, count in pieces(text.tree).items():
            starts = range(num_added)
            came = [tuple(tokens[i : min(i + len(piece), length)]) == piece for i in starts]
            assert count == sum(came)


def longest_that_came_before(tokens, depth):
    lengths = range(min(depth, len(tokens)) - 1, 0, -1)
    return next((n for n in lengths if tokens[-n:] in windows(tokens[:-1], n)), 0)


def windows(tokens, size):
    return [tokens[start : start + size] for start in range(len(tokens) - size + 1)]


@given(DEPTHS, st.lists(TEXTS, min_size=1, max_size=5), TEXTS, st.floats(0, 1))
def test_a_continuation_is_the_most_frequent_one(depth, texts, context, min_prob):
    tree, counts = SuffixTree(depth), counted(texts, depth)
    for text in texts:
        add(tree, text)
    place = tree.find(context)
    assert (place is None) == (tuple(context) not in counts)
    if place is None:
        return
    made = tree.continuation(place, max_tokens=4, min_prob=min_prob)
    prefix, prob, score = tuple(context), 1.0, 0.0
    for token in made.token_ids:
        followers = {piece[-1]: n for piece, n in counts.items() if piece[:-1] == prefix}
        assert followers[token] == max(followers.values())
        prob *= followers[token] / counts[prefix]
        assert prob >= min_prob or prob > 1 - 1e-9
        score += prob
        prefix += (token,)
    assert abs(made.score - score) < 1e-9
    if len(made.token_ids) < 4:
        best = max((n for piece, n in counts.items() if piece[:-1] == prefix), default=0)
        assert best == 0 or prob * best / counts[prefix] < min_prob + 1e-9


def test_the_latest_of_equally_frequent_followers_is_used():
    tree = SuffixTree(4)
    add(tree, array("i", [1, 2, 9, 1, 3]))
    assert list(tree.continuation(tree.find(array("i", [1])), 1, 0.0).token_ids) == [3]


def test_memory_is_at_most_two_nodes_per_token():
    text = OnlineSuffixTree(24)
    for token in [7] * 300 + [5, 6] * 200 + list(range(300)):
        text.append(token)
    assert text.tree.num_nodes <= 2 * len(text.token_ids)
