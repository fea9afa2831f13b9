"""Trees of drafts on recurrent layers: each node has the state of its path, which may be kept."""

import random

import pytest
import torch

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, SlotMove
from specdec.kernels.reference.state_pool import StatePool
from specdec.models.cpu_decoder import NativeHybridDecoder
from specdec.types.drafts.draft_tree import paths
from tests.specdec.models.families import save_family
from tests.specdec.models.hybrid_families import HYBRIDS
from tests.specdec.models.passes import BLOCK_SIZE
from tests.specdec.models.test_hybrid import KERNELS, Passes, assert_close, text
from tests.specdec.threads import num_threads
from tests.specdec.trees import random_parents

QUICK = ("lfm2", "qwen3-next", "granite-4", "kimi-linear")
FAMILIES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS
]
NUM_NODES = 9
TREES = ((-1, -1, 0, 0, 2, 1, 4, 6, 0), (-1,) * NUM_NODES, None, None)
"""The first one has branches at several depths; None for a random one."""


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    save_family(directory, request.param)
    return directory


class Trees(Passes):
    """Passes of a sequence whose guesses are trees, beside one with a chain."""

    @torch.inference_mode()
    def run_tree(self, known, nodes, start, parents):
        """Return the logits of the last known token and of each node."""
        self.states.reset(0)
        other = Chunk(text(13, seed=5), 0, list(range(16, 24)), num_guesses=6)
        ids, count = [*known, *nodes], len(nodes)
        chunk = Chunk(ids, start, self.table, parents, num_guesses=count, state_slot=1)
        hidden = self.model(ForwardBatch([other, chunk], BLOCK_SIZE), self.cache)
        return self.model.compute_logits(hidden)[-count - 1 :].clone()

    def keep(self, base, path):
        """Keep the states and the KV of a path after a base."""
        self.states.keep_path(1, path)
        slots = ((base + 1 + node, base + 1 + place) for place, node in enumerate(path))
        if moves := [SlotMove(*each) for each in slots if each[0] != each[1]]:
            self.model.move_kv(self.cache, moves)


def expected_after(plain, ids, count=1):
    """Return the logits of the last tokens of a text, run at once."""
    plain.states.reset(1)
    return plain.run(ids, 0)[-count:]


def assert_same_bits(found, expected):
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def check_trees(directory, kernels, num_known=1):
    """Compare each node with its path run alone, and go on after a random path, several times.

    num_known: tokens of the first row before its tree, and of the prompt.
    """
    passes, plain = (Trees(directory, kernels, max_guesses=NUM_NODES) for _ in range(2))
    is_native = isinstance(passes.model, NativeHybridDecoder)
    same = assert_same_bits if is_native else assert_close
    generator, known, start = random.Random(num_known), text(num_known), 0
    if num_known == 1:
        passes.run(text(21), 0)
        known, start = [7], 21
    ids = [*text(start), *known]
    for tree in TREES:
        parents = tree or random_parents(generator, NUM_NODES)
        nodes = [generator.randrange(383) for _ in parents]
        found = passes.run_tree(known, nodes, start, parents)
        for node, path in enumerate(((), *paths(parents))):
            chain = [*ids, *(nodes[each] for each in path)]
            same(found[node], expected_after(plain, chain)[0])
        path = generator.choice(paths(parents))
        passes.keep(len(ids) - 1, path)
        ids += [*(nodes[each] for each in path), generator.randrange(383)]
        known, start = ids[-1:], len(ids) - 1
    same(passes.run(known, start)[0], expected_after(plain, ids)[0])


@KERNELS
def test_nodes_have_the_states_of_their_paths(directory, kernels):
    check_trees(directory, kernels)


@pytest.mark.slow
@KERNELS
@pytest.mark.parametrize("num_known", [2, 17, 40])
def test_a_tree_may_follow_a_prompt(directory, kernels, num_known):
    check_trees(directory, kernels, num_known)


@pytest.mark.slow
def test_native_nodes_do_not_depend_on_the_number_of_threads(directory):
    with num_threads(3):
        check_trees(directory, "auto")


def of_the_node_before(self, chunk, first):
    """Let each node follow the node before it, as in a chain."""
    span = ADVANCE(self, chunk, first)
    return span._replace(parents=tuple(range(-1, len(span.parents) - 1)))


def not_moved(self, slot, nodes):
    """Leave the inputs of nodes in their order."""
    self._slots[slot].num_tail = len(nodes)


ADVANCE = StatePool._advance


@pytest.mark.parametrize(
    ("method", "fault"), [("_advance", of_the_node_before), ("keep_path", not_moved)]
)
def test_planted_faults_change_logits(directory, monkeypatch, method, fault):
    monkeypatch.setattr(StatePool, method, fault)
    with pytest.raises(AssertionError):
        check_trees(directory, "torch")
