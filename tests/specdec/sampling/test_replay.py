"""Margins of tokens: the least change of logits that lets a token win, by brute force."""

import numpy as np
import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling import replay
from specdec.sampling.device import device_sampler
from specdec.sampling.replay import OutputReplay, token_margins
from specdec.sampling.sampler import sample
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.sampling.sampling_spec import Replay, SamplingRules
from specdec.types.sharding import partition
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.sampling_rows import sampling_rows

VOCAB = 200
ALONE = VocabShard(TensorParallelGroup(), 0, VOCAB)
RULES = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 12},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
]


def logits_of(count, seed=0):
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def batch_of(rules, count):
    return sampling_rows(range(count), seed=9, choice=1, **rules)


def compared(logits, output, rules, tolerance=1e-3):
    rules = SamplingRules(**rules, seed=9, choice=1, replay=Replay(tuple(output), 1, tolerance))
    found = OutputReplay(rules, [3], range(VOCAB)).compare(logits.clone(), 0, ALONE)
    return found.token_ids[:, 1], -found.logprobs[:, 0], found.ranks


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_own_samples_are_equal(rules):
    logits = logits_of(64)
    sampled = sample(logits, batch_of(rules, 64), ALONE).tolist()
    own, margins, ranks = compared(logits, sampled, rules)
    assert own.tolist() == sampled
    assert not margins.any()
    assert set(ranks.tolist()) == {1}


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_samples_of_changed_logits_are_within_the_change(rules):
    """No difference of two logits changes by more than the tolerance: there is no false alarm."""
    count, tolerance = 400, 0.05
    logits = logits_of(count)
    noise = torch.rand(count, VOCAB, generator=torch.Generator().manual_seed(1)) - 0.5
    output = sample(logits + tolerance * noise, batch_of(rules, count), ALONE).tolist()
    own, margins, ranks = compared(logits, output, rules, tolerance)
    assert (own != output).sum() > 2, "the change changes some tokens"
    assert margins.max() <= tolerance
    assert ((ranks == 1) == (own == output)).all()


@pytest.mark.parametrize("rules", RULES[:2], ids=str)
def test_a_margin_is_the_raise_of_the_logit_that_wins(rules):
    logits = logits_of(32)
    output = [(token + 7) % VOCAB for token in sample(logits, batch_of(rules, 32), ALONE).tolist()]
    _, margins, _ = compared(logits, output, rules)
    for factor, wins in ((1.001, True), (0.999, False)):
        raised = logits.clone()
        raised[range(32), output] += torch.from_numpy(margins) * factor
        again = sample(raised, batch_of(rules, 32), ALONE).numpy()
        assert ((again == output) == wins).all()


def test_a_token_that_is_cut_is_as_far_as_the_cut():
    """With top_k 1 the noise does not matter: the margin is the distance from the best logit."""
    logits = logits_of(8)
    best, second = logits.topk(2).values.T
    output = logits.topk(2).indices[:, 1].tolist()
    _, margins, _ = compared(logits, output, {"temperature": 2.0, "top_k": 1})
    assert margins == pytest.approx((best - second).numpy(), rel=1e-4)


def test_masked_tokens_have_no_finite_margin():
    logits = logits_of(4)
    logits[:, 5] = -torch.inf
    _, margins, ranks = compared(logits, [5] * 4, {"temperature": 1.0})
    assert np.isinf(margins).all()
    assert set(ranks.tolist()) == {2}


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_memory_is_bounded_by_slabs_of_rows(rules, monkeypatch):
    logits, tokens = logits_of(16), np.arange(16) * 12
    expected = token_margins(logits, tokens, batch_of(rules, 16), ALONE, 1e-3)
    counts, margins = [], replay._margins
    monkeypatch.setattr(device_sampler, "SLAB_LOGITS", 5 * VOCAB)
    monkeypatch.setattr(
        replay, "_margins", lambda *own: (counts.append(len(own[0])), margins(*own))[1]
    )
    assert (token_margins(logits, tokens, batch_of(rules, 16), ALONE, 1e-3) == expected).all()
    assert counts == [5, 5, 5, 1]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_ranks_agree_with_one(rules):
    logits, tokens = logits_of(16), np.arange(16) * 12
    expected = token_margins(logits, tokens, batch_of(rules, 16), ALONE, 1e-3)

    def of_rank(group):
        share = partition(VOCAB, group.size)[group.rank]
        part = logits[:, share.start : share.stop]
        shard = VocabShard(group, share.start, VOCAB)
        return token_margins(part, tokens, batch_of(rules, 16), shard, 1e-3)

    for found in run_ranks(3, of_rank):
        assert found == pytest.approx(expected, rel=1e-5)
