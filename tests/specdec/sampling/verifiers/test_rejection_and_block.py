# Modules: specdec.sampling.verifiers.draft_batch, specdec.sampling.verifiers.rejection
"""Single rounds of `rejection` and `block`: exact tokens, ranks, NaN logits, counters."""

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from specdec.sampling.verifiers import Draft
from specdec.sampling.verifiers.rejection import prefix_weights
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import DraftProbs
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.verifiers.trials import random_logits, sampling_batch, verified_by

VOCAB_SIZE = 16
BOTH = pytest.mark.parametrize("verifier", ["rejection", "block"])


def verify(verifier, logits, drafts, *, seed=0, shard=None, temperature=1.0):
    """Verify drafts: Draft objects, or tokens of probability 1. Each has a separate seed."""
    drafts = [each if isinstance(each, Draft) else Draft(each) for each in drafts]
    lengths = torch.tensor([len(each.token_ids) + 1 for each in drafts])
    seeds = torch.arange(len(drafts)).repeat_interleave(lengths) + seed
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch = sampling_batch(temperature, seeds, positions)
    return verified_by(verifier, logits, batch, drafts, shard)


def certain(tokens):
    """Return logits of a deterministic target."""
    return one_hot(torch.tensor(tokens), VOCAB_SIZE) * 1e4


def drawn_from(tokens, probs):
    """Make a draft whose tokens were sampled from `probs` [num_tokens, VOCAB_SIZE]."""
    order = np.argsort(-probs, axis=1)
    listed = np.take_along_axis(probs, order, axis=1).astype(np.float32)
    return Draft(tokens, probs=DraftProbs(order.astype(np.int32), listed))


@BOTH
@pytest.mark.parametrize("has_probs", [True, False])
@pytest.mark.parametrize(
    ("wanted", "drafts", "expected"),
    [
        pytest.param([1, 2, 3, 4], [[1, 2, 3]], [(1, 2, 3, 4)], id="full match"),
        pytest.param([1, 2, 3, 4], [[9, 2, 3]], [(1,)], id="first token differs"),
        pytest.param([1, 2, 3, 4], [[1, 9, 3]], [(1, 2)], id="one in the middle differs"),
        pytest.param([1, 2, 3, 4], [[1, 2, 9]], [(1, 2, 3)], id="last token differs"),
        pytest.param([1, 2, 3, 4], [[4, 3, 2]], [(1,)], id="several differ"),
        pytest.param([5], [[]], [(5,)], id="no draft"),
        pytest.param([1, 2, 3, 5, 5, 6], [[1, 2], [], [5]], [(1, 2, 3), (5,), (5, 6)], id="ragged"),
        pytest.param([1, 2, 0, 0], [[0], [0]], [(1,), (0, 0)], id="token 0"),
    ],
)
def test_exact_tokens_of_a_deterministic_target(verifier, has_probs, wanted, drafts, expected):
    spread = np.full(VOCAB_SIZE, 1 / VOCAB_SIZE)
    given = [
        drawn_from(draft, np.tile(spread, (len(draft), 1))) if has_probs and draft else draft
        for draft in drafts
    ]
    for seed in range(5):
        verified = verify(verifier, certain(wanted), given, seed=seed)
        assert list(verified) == expected
        assert verified.num_accepted.tolist() == [len(tokens) - 1 for tokens in expected]


@BOTH
def test_an_impossible_token_is_never_accepted_nor_sampled(verifier):
    logits = random_logits(3, VOCAB_SIZE, spread=1.0, seed=1)
    logits[:, 5] = -torch.inf
    verified = verify(verifier, logits.repeat(200, 1), [[3, 5]] * 200)
    assert 5 not in verified.token_ids
    assert 0 < verified.num_accepted.sum() <= 200


def test_prefix_weights_follow_the_recurrence():
    ratios = torch.tensor([[0.5, 3, 0.9, 0], [1, 1, 1, 1], [2, 0.25, 8, 1]], dtype=torch.float64)
    expected = [[1, 0.5, 1, 0.9, 0], [1, 1, 1, 1, 1], [1, 1, 0.25, 1, 1]]
    torch.testing.assert_close(prefix_weights(ratios), torch.tensor(expected, dtype=torch.float64))


def a_ragged_batch(seed):
    generator = np.random.default_rng(seed)
    lengths = [3, 0, 1, 5, 2, 4]
    logits = random_logits(sum(lengths) + len(lengths), VOCAB_SIZE, spread=1.5, seed=seed)
    drafts = []
    for index, length in enumerate(lengths):
        tokens = generator.integers(0, VOCAB_SIZE, length).tolist()
        probs = generator.dirichlet(np.ones(VOCAB_SIZE), length)
        drafts.append(drawn_from(tokens, probs) if index % 2 == 0 and length else Draft(tokens))
    return logits, drafts


@BOTH
@pytest.mark.parametrize("size", [2, 3])
def test_sharded_ranks_equal_one_rank(verifier, size):
    def verified(group, logits, drafts, seed):
        held = group.share_of(VOCAB_SIZE)
        shard = VocabShard(group, held.start, VOCAB_SIZE)
        own = logits[:, held.start : held.stop]
        return list(verify(verifier, own, drafts, seed=seed, shard=shard))

    for seed in range(8):
        logits, drafts = a_ragged_batch(seed)
        expected = list(verify(verifier, logits, drafts, seed=seed))
        ranks = run_ranks(size, lambda group: verified(group, logits, drafts, seed))  # noqa: B023
        assert ranks == [expected] * size


@BOTH
def test_ranks_exchange_at_most_a_row_of_each_sequence(verifier):
    logits, drafts = a_ragged_batch(0)
    sizes = []

    def verified(group):
        swap = group.exchange.swap

        def counting_swap(rank, tensor):
            sizes.append(tensor.numel())
            return swap(rank, tensor)

        group.exchange.swap = counting_swap
        held = group.share_of(VOCAB_SIZE)
        shard = VocabShard(group, held.start, VOCAB_SIZE)
        verify(verifier, logits[:, held.start : held.stop], drafts, shard=shard)

    run_ranks(2, verified)
    assert max(sizes) <= len(drafts) * VOCAB_SIZE


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_logits_of_one_sequence_do_not_affect_others(verifier, bad):
    logits, drafts = a_ragged_batch(3)
    good = list(verify(verifier, logits, drafts))
    logits[4] = bad  # the only row of the second sequence
    logits[7:13] = bad  # all rows of the fourth
    verified = list(verify(verifier, logits, drafts))
    for index in (0, 2, 4, 5):
        assert verified[index] == good[index]
    assert all(0 <= token < VOCAB_SIZE for tokens in verified for token in tokens)


@BOTH
def test_verification_does_not_depend_on_the_batch(verifier):
    logits, drafts = a_ragged_batch(5)
    together = list(verify(verifier, logits, drafts))
    start = 0
    for index, draft in enumerate(drafts):
        end = start + len(draft.token_ids) + 1
        assert list(verify(verifier, logits[start:end], [draft], seed=index)) == [together[index]]
        start = end


def test_block_accepts_a_prefix_that_rejection_rejects():
    """A token that is drafted too often is compensated by one that is drafted too rarely.

    The first draft token has p / q = 0.5, the second 2: so p_1 = 0.5 and p_2 = 1, and the whole
    draft is always kept. Rejection keeps the first half of the time, and then the second.
    """
    target, draft = np.zeros((3, VOCAB_SIZE)), np.zeros((2, VOCAB_SIZE))
    target[:, :2] = [[0.4, 0.6], [1.0, 0.0], [0.5, 0.5]]
    draft[:, :2] = [[0.8, 0.2], [0.5, 0.5]]
    count = 400
    logits = torch.from_numpy(target).log().float().repeat(count, 1)
    drafts = [drawn_from([0, 0], draft)] * count
    assert (verify("block", logits, drafts).num_accepted == 2).all()
    accepted = verify("rejection", logits, drafts).num_accepted
    assert set(accepted.tolist()) == {0, 2}
    assert 0.8 < accepted.mean() < 1.2
