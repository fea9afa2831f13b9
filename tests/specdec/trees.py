"""Random trees of drafts, and a proposer that guesses trees from the known answer with errors."""

import random

import numpy as np
import torch

from specdec.speculation.proposers import Proposal
from specdec.types.drafts.draft_tree import depths, paths
from tests.specdec.dynamic_tree import Children


def random_parents(generator: random.Random, count: int, width: float = 0.5) -> tuple[int, ...]:
    """Return a tree of `count` nodes; `width` is the share that does not follow the node before."""
    parents = [-1]
    for index in range(1, count):
        branches = generator.random() < width
        parents.append(generator.randrange(-1, index) if branches else index - 1)
    return tuple(parents)


def chain_of(text, base, tokens, parents, node):
    """Return the text up to a node of a tree; `text[base]` is the tree's base."""
    return [*text[: base + 1], *(tokens[each] for each in paths(parents)[node])]


def best_children(scores, count) -> Children:
    """Return the `count` best children of each node by a softmax of scores [N, vocab_size]."""
    token_ids = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    confidences = np.take_along_axis(weights, token_ids, axis=1)
    return Children(token_ids, confidences / weights.sum(axis=1, keepdims=True))


def random_survival(
    seed: int, *, has_ties: bool, num_rows: int = 5
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return arguments of `RowOps.best_first`; some tokens are missing, and some budgets are 0."""
    generator = torch.Generator().manual_seed(seed)
    depth, num_children, max_nodes = 1 + seed % 7, 1 + seed * 5 % 9, 1 + seed * 7 % 40
    size = (num_rows, depth, num_children)
    values = -3 * torch.rand(size, generator=generator, dtype=torch.float64)
    values = (values.round() if has_ties else values).sort(2, descending=True).values
    is_missing = torch.rand(size, generator=generator).sort(2).values > 0.8
    num_nodes = torch.randint(max_nodes + 1, (num_rows,), generator=generator)
    return values.masked_fill(is_missing, -torch.inf), num_nodes, max_nodes


class TreeProposer:
    """Guesses trees around the known continuation of each text.

    Each node continues the answer with probability `accuracy` where its parent does and no sibling
    does; other nodes are wrong. At most `num_nodes`.
    """

    def __init__(self, answers, num_nodes, accuracy=0.7, seed=0, vocab_size=383):
        """answers: whole texts, by prompt."""
        self.answers = answers
        self.num_nodes = num_nodes
        self.accuracy = accuracy
        self.vocab_size = vocab_size
        self.random = random.Random(seed)

    def take(self, requests):
        return [self.propose(each) for each in requests]

    def ahead(self, rows):
        pass

    def end_step(self, *, is_lost=False):
        pass

    def release(self, seq_id):
        pass

    def propose(self, request):
        seq, count = request.seq, min(self.num_nodes, max(request.max_tokens, request.max_nodes))
        answer = self.answers[tuple(seq.token_ids[: seq.num_prompt_tokens])]
        tokens, parents = self.tree(answer, seq.num_tokens, count)
        return Proposal(
            seq.seq_id, seq.num_tokens, seq.token_ids[-1], tokens, parents=parents or None
        )

    def tree(self, answer, length, count):
        parents = random_parents(self.random, count) if count else ()
        depth, right, tokens = depths(parents), {-1}, []
        taken = {}
        for node, parent in enumerate(parents):
            place = length + depth[node] - 1
            siblings = taken.setdefault(parent, set())
            true = answer[place] if parent in right and place < len(answer) else None
            if true is not None and true not in siblings and self.random.random() < self.accuracy:
                token = true
                right.add(node)
            else:
                free = [each for each in range(3, self.vocab_size) if each != true]
                token = self.random.choice([each for each in free if each not in siblings])
            siblings.add(token)
            tokens.append(token)
        return tuple(tokens), parents
