"""Tests of the best children of tree nodes: against a whole vocabulary of noise, and by ranks."""

import numpy as np
import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.sampling.device.device_children import NUM_WEIGHED, confidences_of_scores
from specdec.sampling.draft_temperature import draft_batch_of
from specdec.sampling.gumbel import CHUNK_TOKENS, gumbel_noise
from specdec.sampling.row_ops import CpuRowOps, RowOps
from specdec.sampling.sampler import sample
from specdec.sampling.top_children import best_children_of
from specdec.sampling.vocab_shard import VocabShard
from tests.specdec.dynamic_tree import Children
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.sampling_rows import sampling_rows
from tests.specdec.sampling.verifiers.trials import random_logits, sampling_batch, shard_of
from tests.specdec.trees import best_children

NUM_ROWS, VOCAB_SIZE = 12, 700

requires_native = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")


def children(found):
    return Children(found.token_ids.numpy(), found.confidences.numpy())


def best_by_noise(logits, batch, count, shard):
    return children(best_children_of(logits, batch, count, shard, on_host=True))


def best_by_logits(logits, count, shard):
    return best_by_noise(logits, None, count, shard)


def by_kernel(logits, target_ids, batch, count):
    return children(CpuRowOps().draft_children(logits, target_ids, batch, count))


def batch_of(num_rows, **changes):
    values = {"temperature": 0.8, "seed": range(num_rows), "positions": [3] * num_rows}
    return sampling_rows(**{**values, **changes})


def noise_of(batch, vocab_size):
    num_chunks = -(-vocab_size // CHUNK_TOKENS)
    rows = torch.arange(batch.num_rows).repeat_interleave(num_chunks)
    chunks = torch.arange(num_chunks).repeat(batch.num_rows)
    noise = gumbel_noise(batch.noise_keys[rows], chunks)
    return noise.view(batch.num_rows, -1)[:, :vocab_size].double().numpy()


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_children_by_noise_are_the_best_of_the_whole_vocabulary(spread, count):
    logits = random_logits(NUM_ROWS, VOCAB_SIZE, spread=spread, seed=4)
    batch, shard = batch_of(NUM_ROWS), shard_of(VOCAB_SIZE)
    found = best_by_noise(logits, batch, count, shard)
    log_q = (logits / 0.8).log_softmax(-1).double().numpy()
    expected = best_children(0.8 * (log_q + noise_of(batch, VOCAB_SIZE)), count)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.token_ids[:, 0].tolist() == sample(logits, batch, shard).tolist()
    assert (np.diff(found.confidences) <= 0).all()
    assert (found.confidences[:, :NUM_WEIGHED].sum(axis=1) < 1.001).all()
    if spread == 6.0:  # 32 tokens have nearly all of the weight
        np.testing.assert_allclose(found.confidences, expected.confidences, atol=0.02)


@pytest.mark.parametrize("temperature", [0.3, 0.8, 2.0])
def test_confidences_are_how_often_a_draft_with_gumbel_errors_is_right(temperature):
    """40,000 targets with the noise of one draft.

    A rate's standard deviation is at most 0.0025, and each of 18 is within 5 of them: false alarms
    have odds of about 1 in 100,000.
    """
    generator, num_targets = np.random.default_rng(5), 40_000
    logits, noise = generator.normal(scale=2.0, size=6), generator.gumbel(size=6)
    target = logits + generator.gumbel(size=(num_targets, 6))
    chosen = (target / temperature + noise).argmax(axis=1)
    scores = logits / temperature + noise
    order = np.argsort(-scores)
    found = confidences_of_scores(
        torch.from_numpy(scores[None, order]), torch.tensor([temperature]).double()
    )
    rates = np.bincount(chosen, minlength=6)[order] / num_targets
    np.testing.assert_allclose(found[0].numpy(), rates, atol=5 * 0.0025)


@pytest.mark.parametrize("ops", [RowOps, pytest.param(CpuRowOps, marks=requires_native)])
def test_confidences_do_not_depend_on_how_many_children_are_asked_for(ops):
    """Those of the best 32 tokens sum to 1."""
    logits, batch = random_logits(NUM_ROWS, VOCAB_SIZE, spread=1.0, seed=4), batch_of(NUM_ROWS)
    few, many = (
        ops().children(logits, batch, count, on_host=True) for count in (5, NUM_WEIGHED + 8)
    )
    np.testing.assert_allclose(few.confidences, many.confidences[:, :5], rtol=1e-12)
    np.testing.assert_allclose(many.confidences[:, :NUM_WEIGHED].sum(1), 1, rtol=1e-12)
    assert (many.confidences > 0).all()


def test_confidences_of_few_or_no_tokens():
    scores = torch.tensor([[3.0, -torch.inf], [-torch.inf, -torch.inf]]).double()
    found = confidences_of_scores(scores, torch.full((2,), 0.5).double())
    assert found.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_truncated_tokens_are_no_children():
    logits = random_logits(NUM_ROWS, VOCAB_SIZE, spread=2.0, seed=4)
    batch = batch_of(NUM_ROWS, top_k=[3] * NUM_ROWS)
    found = best_by_noise(logits, batch, 5, shard_of(VOCAB_SIZE))
    best = logits.topk(3).indices
    for row in range(NUM_ROWS):
        token_ids, _ = found.of(row)
        assert sorted(token_ids) == sorted(best[row].tolist())


def test_children_by_logits_have_their_probabilities():
    logits = torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.2, 0.4]]).log()
    found = best_by_logits(logits, 2, shard_of(3))
    assert found.token_ids.tolist() == [[1, 2], [0, 2]]
    np.testing.assert_allclose(found.confidences, [[0.6, 0.3], [0.4, 0.4]], rtol=1e-6)


def test_a_row_without_tokens_has_no_children():
    logits = torch.full((1, 100), -torch.inf)
    assert best_by_logits(logits, 3, shard_of(100)).of(0) == ([], [])
    assert best_by_noise(logits, batch_of(1), 3, shard_of(100)).of(0) == ([], [])


@pytest.mark.parametrize("find", ["logits", "noise", pytest.param("kernel", marks=requires_native)])
def test_several_ranks_find_the_children_of_one(find):
    logits = random_logits(NUM_ROWS, VOCAB_SIZE, spread=2.0, seed=4)

    def on_rank(group):
        part = group.share_of(VOCAB_SIZE)
        ops = CpuRowOps() if find == "kernel" else RowOps()
        own = logits[:, part.start : part.stop]
        shard = VocabShard(group, part.start, VOCAB_SIZE, ops)
        return best_by_noise(own, None if find == "logits" else batch_of(NUM_ROWS), 40, shard)

    [alone] = run_ranks(1, on_rank)
    for found in run_ranks(3, on_rank):
        assert (found.token_ids == alone.token_ids).all()
        np.testing.assert_allclose(found.confidences, alone.confidences, rtol=1e-5)


CUTS = [{}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.05}]


@requires_native
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_the_kernel_finds_the_children_of_the_reference(is_reduced, dtype, cut):
    logits = random_logits(NUM_ROWS, VOCAB_SIZE, spread=2.0, seed=4).to(dtype)
    batch = batch_of(NUM_ROWS, **{name: [value] * NUM_ROWS for name, value in cut.items()})
    drafted = torch.arange(1, VOCAB_SIZE, 3) if is_reduced else torch.arange(VOCAB_SIZE)
    own = torch.full_like(logits, -torch.inf)
    own[:, drafted] = logits[:, drafted]
    expected = best_by_noise(own, batch, 5, shard_of(VOCAB_SIZE))
    found = by_kernel(logits[:, drafted], drafted.int(), batch, 5)
    for row in range(NUM_ROWS):
        (token_ids, confidences), (right, their_confidences) = found.of(row), expected.of(row)
        assert token_ids == right
        assert confidences == pytest.approx(their_confidences, abs=1e-4)


@requires_native
def test_the_kernel_finds_the_best_logits_at_a_temperature_near_zero():
    logits, shard = 30 + random_logits(4, 300, spread=3.0, seed=1), shard_of(300)
    batch = draft_batch_of(sampling_batch(1e-300, torch.arange(4), torch.zeros(4).long()))
    found = by_kernel(logits, torch.arange(300).int(), batch, 5)
    expected = best_by_logits(logits, 5, shard)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert (found.confidences > 0).all()


@requires_native
def test_the_kernel_finds_no_children_in_rows_without_valid_logits():
    logits = torch.zeros(3, 100)
    logits[0] = -torch.inf
    logits[1, 50] = torch.nan
    found = by_kernel(logits, torch.arange(100).int(), batch_of(3), 4)
    assert [len(found.of(row)[0]) for row in range(3)] == [0, 0, 4]


NUM_TRIALS = 4000


@pytest.mark.parametrize(
    ("count", "plain", "noise"), [(1, 0.175, 0.587), (2, 0.564, 0.879), (4, 0.766, 0.986)]
)
def test_children_ranked_with_the_noise_are_accepted_more_often(count, plain, noise):
    """At temperature 0.8, with a draft that is close to the target."""
    target = random_logits(1, CHUNK_TOKENS, spread=2.0, seed=1)
    draft = target + random_logits(1, CHUNK_TOKENS, spread=0.7, seed=2)
    seeds, shard = torch.arange(NUM_TRIALS), shard_of(CHUNK_TOKENS)
    batch = sampling_batch(0.8, seeds, torch.zeros_like(seeds))
    right = sample(target.expand(NUM_TRIALS, -1), batch, shard).numpy()[:, None]
    drafts = draft.expand(NUM_TRIALS, -1)
    by_noise = best_by_noise(drafts, batch, count, shard)
    rates = {
        "noise": float((by_noise.token_ids == right).any(1).mean()),
        "plain": float((best_by_logits(drafts, count, shard).token_ids == right).any(1).mean()),
    }
    assert rates == pytest.approx({"noise": noise, "plain": plain}, abs=0.001)
