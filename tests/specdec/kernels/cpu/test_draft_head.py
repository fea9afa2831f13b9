# Modules: specdec.kernels.cpu.drafts
"""Native passes and drafts of heads with attention, against a dense reference."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, PairInputs
from specdec.sampling.row_ops import RowOps
from tests.specdec.kernels.cpu.tiny_head import (
    EAGLE1,
    EAGLE3,
    HIDDEN,
    TARGET_VOCAB,
    VARIANTS,
    TinyHead,
)
from tests.specdec.sampling.sampling_rows import sampling_rows
from tests.specdec.threads import num_threads

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")

BLOCK_SIZE, NUM_BLOCKS = 16, 80


class Texts:
    """Pairs of several sequences in scattered blocks of one pool; pair j is in slot j."""

    def __init__(self, head, count=3, length=300):
        generator = torch.Generator().manual_seed(11)
        self.head, self.kernel = head, head.kernel()
        self.tokens = torch.randint(0, TARGET_VOCAB, (count, length), generator=generator)
        self.features = 3 * torch.randn(count, length, HIDDEN, generator=generator)
        order = torch.randperm(NUM_BLOCKS, generator=generator)
        self.tables = order[: count * (NUM_BLOCKS // count)].view(count, -1).tolist()
        self.cache = self.kernel.new_kv_cache(NUM_BLOCKS, BLOCK_SIZE, torch.float32)

    def batch(self, *parts):
        """Return the batch and features of pairs [begin, end) of sequences, begin from 1 on."""
        chunks = [
            Chunk(self.tokens[index, begin:end].tolist(), begin, self.tables[index])
            for index, begin, end in parts
        ]
        features = [self.features[index, begin - 1 : end - 1] for index, begin, end in parts]
        return ForwardBatch(chunks, BLOCK_SIZE), torch.cat(features)

    def run(self, *parts):
        """Return the states after the last pairs."""
        return self.kernel.forward(*self.batch(*parts), self.cache)

    def draft(self, counts, params, *parts):
        return self.kernel.draft(PairInputs(*self.batch(*parts), self.cache), counts, params)

    def draft_step_by_step(self, counts, sample, *parts):
        """Draft by one pass for each token and sequence; sample: from (hidden, row, index)."""
        drafts = []
        for row, (part, count) in enumerate(zip(parts, counts, strict=True)):
            sequence, _, end = part
            state, own = self.run(part), []
            for index in range(count):
                own.append(sample(state.hidden, row, index))
                chunk = Chunk([own[-1]], end + index, self.tables[sequence])
                if index + 1 < count:
                    pairs = ForwardBatch([chunk], BLOCK_SIZE)
                    state = self.kernel.forward(pairs, state.features, self.cache)
            drafts.append(own)
        return drafts


def sampling(count, temperature, position=7, **options):
    """Return the parameters of `count` rows at `position`, with different seeds."""
    seeds = range(50, 50 + count)
    return sampling_rows(
        [position] * count, temperature=temperature, seed=seeds, choice=2, **options
    )


def greedy(head):
    """Return a sampler of the most likely draft token, as the target's."""

    def sample(hidden, row, index):
        del row, index
        return head.target_tokens[(hidden @ head.lm_head.t()).argmax().item()].item()

    return sample


def coupled(head, temperature, **options):
    """Return the reference of a sampler with the target's noise."""

    def sample(hidden, row, index):
        logits = torch.full((1, TARGET_VOCAB), -torch.inf)
        logits[:, head.target_tokens.long()] = hidden @ head.lm_head.t()
        rows = sampling(row + 1, temperature, 7 + index, **options)
        return RowOps().sample_batch(logits, rows[np.array([row])]).item()

    return sample


PARTS = (0, 1, 40), (1, 5, 6), (2, 1, 3)


@pytest.fixture(params=VARIANTS)
def texts(request):
    texts = Texts(TinyHead(VARIANTS[request.param]))
    texts.cache.fill_(torch.nan)  # slot 0, and slots of other sequences, must not be read
    return texts


def test_states_equal_the_reference(texts):
    for begin, end in pairwise((1, 2, 30, 31, 290)):
        found = texts.run((0, begin, end))
        hidden, features = texts.head.states(texts.tokens[0, 1:end], texts.features[0, : end - 1])
        torch.testing.assert_close(found.hidden, hidden[-1:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.features, features[-1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_states_do_not_depend_on_batch_chunking_or_threads(texts, count):
    expected = texts.run((0, 1, 290))
    with num_threads(count):
        texts.run((0, 1, 3), (1, 1, 270))
        texts.run((1, 270, 271), (0, 3, 280), (2, 1, 9))
        found = texts.run((2, 9, 12), (0, 280, 290), (1, 271, 272))
    assert torch.equal(found.hidden[1:2], expected.hidden)
    assert torch.equal(found.features[1:2], expected.features)


@pytest.mark.parametrize("counts", [(4, 4, 4), (1, 5, 0), (0, 0, 3)])
def test_greedy_draft_equals_steps(texts, counts):
    texts.run((1, 1, 5))
    found = texts.draft(counts, sampling(3, 0.0).params, *PARTS)
    assert found == texts.draft_step_by_step(counts, greedy(texts.head), *PARTS)


@pytest.mark.parametrize("options", [{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.001}])
@pytest.mark.parametrize("temperature", [1.0, 8.0])
def test_coupled_draft_has_the_noise_of_the_target(texts, temperature, options):
    texts.run((1, 1, 5))
    counts = 6, 2, 6
    found = texts.draft(counts, sampling(3, temperature, **options).params, *PARTS)
    sample = coupled(texts.head, temperature, **options)
    assert found == texts.draft_step_by_step(counts, sample, *PARTS)


def test_samples_of_many_rows_equal_the_reference():
    texts = Texts(TinyHead(EAGLE3), count=1)
    sample = coupled(texts.head, 8.0)
    params = sampling(200, 8.0).params
    state = texts.run((0, 1, 20))
    expected = [sample(state.hidden, row, 0) for row in range(200)]
    found = [
        texts.draft((1,), params[row : row + 1], (0, 1, 20))[0][0] for row in range(len(params))
    ]
    assert found == expected
    assert len(set(found)) > 20


def test_drafts_only_the_kv_for_count_zero():
    texts, others = (Texts(TinyHead(EAGLE3)) for _ in range(2))
    found = texts.draft((0, 0, 0), sampling(3, 1.0).params, (0, 1, 40), (1, 1, 9), (2, 1, 3))
    assert found == [[], [], []]
    others.run((0, 1, 40), (1, 1, 9), (2, 1, 3))
    assert torch.equal(texts.cache, others.cache)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_ends_where_the_head_computes_nan(temperature):
    head = TinyHead(EAGLE1)
    params = sampling(2, temperature).params
    texts = Texts(head, count=2)
    whole = texts.draft((3, 3), params, (0, 1, 9), (1, 1, 9))
    head.embedding[whole[0][1]] = torch.nan
    texts.tokens[texts.tokens == whole[0][1]] = 0 if whole[0][1] else 1
    found = texts.draft((3, 3), params, (0, 1, 9), (1, 1, 9))
    assert found[:1] == texts.draft((2, 0), params, (0, 1, 9), (1, 1, 9))[:1]
    assert found[1]
