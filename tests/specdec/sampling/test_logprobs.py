import pytest
import torch

from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.sharding import partition
from tests.specdec.fakes import run_ranks


def read(logits, token_ids, num_best, num_ranks=1):
    """Return the result, which must be equal on every rank."""
    shares = partition(logits.shape[1], num_ranks)

    def of_rank(group):
        share = shares[group.rank]
        part = logits[:, share.start : share.stop]
        return token_logprobs(
            part, token_ids, num_best, VocabShard(group, share.start, logits.shape[1])
        )

    readings = run_ranks(num_ranks, of_rank)
    for other in readings[1:]:
        assert (other.token_ids == readings[0].token_ids).all()
        assert (other.logprobs == readings[0].logprobs).all()
        assert (other.ranks == readings[0].ranks).all()
    return readings[0]


def check(logits, token_ids, num_best, num_ranks):
    result = read(logits, token_ids, num_best, num_ranks)
    for row, (token, expected) in enumerate(zip(token_ids, logits.log_softmax(1), strict=True)):
        pairs = enumerate(logits[row].tolist())
        order = [t for t, _ in sorted(pairs, key=lambda pair: (-pair[1], pair[0]))]
        assert result.token_ids[row].tolist() == [token, *order[:num_best]]
        own = torch.from_numpy(result.logprobs[row])
        torch.testing.assert_close(own, expected[result.token_ids[row]], atol=1e-5, rtol=0)
        assert result.ranks[row] == 1 + (logits[row] > logits[row, token]).sum()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_best", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab_size", [64, 383, 3000])
def test_equals_log_softmax_and_sorting(num_ranks, num_best, vocab_size):
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    check(logits, [0, 1, vocab_size - 1, 17, 40], num_best, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equal_logits_are_ordered_by_token_id(num_ranks):
    logits = torch.randint(0, 3, (4, 500), generator=torch.Generator().manual_seed(1)).float()
    logits[3] = 0
    check(logits, [0, 250, 499, 77], 20, num_ranks)


def test_a_rank_may_have_fewer_tokens_than_requested():
    check(torch.randn(3, 7, generator=torch.Generator().manual_seed(2)), [0, 3, 6], 7, 3)


def test_other_float_types():
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3)).bfloat16()
    check(logits.float(), [1, 2, 3], 4, 1)
    result = read(logits, [1, 2, 3], 4)
    assert (result.token_ids == read(logits.float(), [1, 2, 3], 4).token_ids).all()


def test_nan_is_never_a_likely_token():
    logits = torch.tensor([[0.0, torch.nan, 1.0], [torch.nan] * 3])
    result = read(logits, [1, 0], 1)
    assert result.logprobs[0, 0] == -torch.inf
    assert result.token_ids[0].tolist() == [1, 2]
