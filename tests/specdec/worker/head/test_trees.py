"""Trees of constructed heads: their shapes, their chain of best tokens, and what they accept."""

import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.heads.networks.base import HeadCapabilities
from specdec.sampling.draft_temperature import draft_batch_of
from specdec.sampling.sampler import sample
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.drafts.draft_tree import depths, first_path, paths, require_tree
from specdec.types.messages import SequenceAdmission, StepInput
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.batch.batch_state import BatchState, TokenSpan
from specdec.worker.head.sampler import HeadSampler, PartialDraft
from specdec.worker.head.trees import HeadTrees

VOCAB_SIZE, DEPTH, NUM_NODES = 90, 4, 14
RULES = [
    SamplingRules(temperature=0.0),
    SamplingRules(temperature=0.8, seed=1),
    SamplingRules(temperature=0.8, seed=2, presence_penalty=0.5),
    SamplingRules(temperature=0.0, frequency_penalty=0.5),
]
NUM_TOKENS = 5


class ConstructedHead:
    """A head whose logits are drawn from the sequence, the depth and, perhaps, the last draft."""

    num_kv_layers = 0
    capabilities = HeadCapabilities()
    max_draft_tokens = None
    target_ids = None
    vocab_size, vocab_slice = VOCAB_SIZE, range(VOCAB_SIZE)
    device = torch.device("cpu")

    def __init__(self, reads_drafts, spread=2.0):
        self.reads_drafts = reads_drafts
        generator = torch.Generator().manual_seed(3)
        shape = (len(RULES), DEPTH, VOCAB_SIZE + 1, VOCAB_SIZE)
        self.table = torch.randn(shape, generator=generator) * spread

    def begin(self, sequences):
        return [(sequence, -1) for sequence in sequences]

    def logits(self, state, index):
        return torch.stack([self.table[sequence, index, last] for sequence, last in state])

    def advance(self, state, token_ids, index):
        if not self.reads_drafts:
            return state
        pairs = zip(state, token_ids, strict=True)
        return [(sequence, token) for (sequence, _), token in pairs]

    def select(self, state, rows):
        return [state[row] for row in rows]


@pytest.fixture
def batch_state():
    state = BatchState(4, torch.device("cpu"), range(VOCAB_SIZE))
    admitted = tuple(
        SequenceAdmission(index, 3, rules, tuple(range(NUM_TOKENS)))
        for index, rules in enumerate(RULES)
    )
    state.update(StepInput(0, (), admitted, (), ()))
    return state


def sampler_of(head, batch_state):
    return HeadSampler(head, batch_state, VocabShard(TensorParallelGroup(), 0, VOCAB_SIZE))


def trees_of(head, batch_state, choices=(), shape=(NUM_NODES, DEPTH)):
    drafts = [PartialDraft(index, NUM_TOKENS, *shape) for index in range(len(RULES))]
    trees = HeadTrees(head, sampler_of(head, batch_state), choices)
    trees.draft(head.begin(range(len(RULES))), drafts)
    return drafts


def chain_of(head, batch_state, sequence):
    """Return the chain that the head drafts without trees."""
    sampler, state = sampler_of(head, batch_state), head.begin([sequence])
    draft = PartialDraft(sequence, NUM_TOKENS, DEPTH, DEPTH)
    for index in range(DEPTH):
        [token] = sampler.select(head.logits(state, index), [draft])
        draft.token_ids.append(token)
        state = head.advance(state, [token], index)
    return draft.token_ids


def texts_in(draft):
    return {tuple(draft.token_ids[node] for node in path) for path in paths(draft.parents)}


@pytest.mark.parametrize("reads_drafts", [False, True])
def test_a_tree_holds_the_chain_and_siblings(batch_state, reads_drafts):
    head = ConstructedHead(reads_drafts)
    for sequence, draft in enumerate(trees_of(head, batch_state)):
        require_tree(draft.parents)
        assert len(draft.token_ids) == NUM_NODES
        assert max(depths(draft.parents)) == DEPTH
        assert len(texts_in(draft)) == NUM_NODES
        first = [draft.token_ids[node] for node in first_path(draft.parents)]
        assert first == chain_of(head, batch_state, sequence)


@pytest.mark.parametrize("spread", [0.3, 6.0])
@pytest.mark.parametrize("reads_drafts", [False, True])
def test_a_tree_accepts_what_its_chain_does_and_more(batch_state, reads_drafts, spread):
    """The target disturbs the logits of the head."""
    head = ConstructedHead(reads_drafts, spread)
    trees = trees_of(head, batch_state)
    num_accepted = {"tree": 0, "chain": 0}
    for seed in range(8):
        noise = torch.randn(head.table.shape, generator=torch.Generator().manual_seed(seed))
        target = ConstructedHead(reads_drafts)
        target.table = head.table + 0.2 * spread * noise
        for sequence, tree in enumerate(trees):
            text = chain_of(target, batch_state, sequence)
            chain = common(chain_of(head, batch_state, sequence), text)
            accepted = max(common(path, text) for path in texts_in(tree))
            assert accepted >= chain
            num_accepted["tree"] += accepted
            num_accepted["chain"] += chain
    assert num_accepted["tree"] > num_accepted["chain"] > 0


def common(drafted, text):
    pairs = zip(drafted, text, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(text)))


@pytest.mark.parametrize("reads_drafts", [False, True])
def test_trees_of_several_sizes_grow_as_alone(batch_state, reads_drafts):
    """The last has only children of the base, and no more of them than it would have alone."""
    head, sizes = ConstructedHead(reads_drafts), [(14, 4), (6, 2), (14, 4), (9, 3)]
    head.table[3, 1] = torch.nan
    drafts = [PartialDraft(index, NUM_TOKENS, *size) for index, size in enumerate(sizes)]
    trees = HeadTrees(head, sampler_of(head, batch_state))
    trees.draft(head.begin(range(len(sizes))), drafts)
    for sequence, (draft, size) in enumerate(zip(drafts, sizes, strict=True)):
        alone = PartialDraft(sequence, NUM_TOKENS, *size)
        trees.draft(head.begin([sequence]), [alone])
        assert (draft.token_ids, draft.parents) == (alone.token_ids, alone.parents)
    counts = [len(draft.token_ids) for draft in drafts]
    assert counts == [14, 6, 14, 7]


def test_logits_of_some_nodes_at_a_time_give_the_same_trees(batch_state, monkeypatch):
    head, num_rows = ConstructedHead(reads_drafts=True), []
    whole, logits = trees_of(head, batch_state), head.logits
    monkeypatch.setattr("specdec.worker.head.trees._MAX_ROWS", 3)
    head.logits = lambda state, index: num_rows.append(len(state)) or logits(state, index)
    for draft, other in zip(trees_of(head, batch_state), whole, strict=True):
        assert (draft.token_ids, draft.parents) == (other.token_ids, other.parents)
    assert max(num_rows) == 3


CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def test_choices_give_the_shape(batch_state):
    head = ConstructedHead(reads_drafts=False)
    [draft, *_] = trees_of(head, batch_state, CHOICES, (len(CHOICES), 3))
    assert draft.parents == (-1, -1, -1, 0, 0, 1, 3)
    best = [head.table[0, depth, -1].topk(3).indices.tolist() for depth in range(3)]
    assert draft.token_ids == [*best[0], best[1][0], best[1][1], best[1][0], best[2][0]]
    [cut, *_] = trees_of(head, batch_state, CHOICES, (5, 2))
    assert cut.parents == (-1, -1, -1, 0, 0)


@pytest.mark.parametrize("reads_drafts", [False, True])
def test_a_tree_ends_where_logits_are_not_numbers(batch_state, reads_drafts):
    head = ConstructedHead(reads_drafts)
    head.table[0, 2] = torch.nan
    head.table[1, 0, -1, 7] = torch.inf
    drafts = trees_of(head, batch_state)
    assert max(depths(drafts[0].parents)) == 2
    assert (drafts[1].token_ids, drafts[1].parents) == ([], None)
    assert max(depths(drafts[2].parents)) == DEPTH


def test_first_children_are_sampled_with_the_noise_of_the_target(batch_state):
    head = ConstructedHead(reads_drafts=True)
    sampler, places = sampler_of(head, batch_state), [(sequence, 9) for sequence in (0, 1)]
    ends = [PartialDraft(sequence, NUM_TOKENS, 4, 4).after([token]) for sequence, token in places]
    logits = head.logits(places, 1)
    children = sampler.children(logits, ends, 5)
    batch = batch_state.sampling_batch([TokenSpan(each, NUM_TOKENS + 1) for each in (0, 1)])
    shard = VocabShard(TensorParallelGroup(), 0, VOCAB_SIZE)
    sampled = sample(logits, draft_batch_of(batch), shard)
    assert children.token_ids[:, 0].tolist() == sampled.tolist()
