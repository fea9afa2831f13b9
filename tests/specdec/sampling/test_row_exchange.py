"""Rows of logits that ranks exchange, so that each has whole ones."""

import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.sampling import row_exchange
from specdec.sampling.row_exchange import gather_rows, own_rows, whole_rows
from specdec.sampling.row_ops import CpuRowOps, RowOps
from specdec.sampling.sampler import sample
from specdec.sampling.vocab_shard import VocabShard
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.device.test_device_sampler import VOCAB, rows

requires_native = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 6, 7])
@pytest.mark.parametrize("vocab_size", [12, 13])
def test_each_row_is_whole_on_one_rank(size, num_rows, vocab_size):
    logits = torch.arange(num_rows * vocab_size, dtype=torch.float32).view(num_rows, vocab_size)

    def on_rank(group):
        tokens = group.share_of(vocab_size)
        shard = VocabShard(group, tokens.start, vocab_size)
        whole = whole_rows(logits[:, tokens.start : tokens.stop], shard)
        assert torch.equal(whole, logits[own_rows(num_rows, shard)])
        of_all = gather_rows(whole.sum(1), num_rows, shard)
        assert group.called == ["all_to_all", "all_gather"]
        return of_all.tolist()

    assert run_ranks(size, on_rank) == [logits.sum(1).tolist()] * size


@pytest.mark.parametrize("ops", [RowOps(), pytest.param(CpuRowOps(), marks=requires_native)])
@pytest.mark.parametrize(("num_rows", "num_slabs"), [(1, 1), (5, 1), (5, 2)])
def test_ranks_sample_shares_of_rows(num_rows, num_slabs, ops, monkeypatch):
    """In slabs, with the tokens of one rank."""
    monkeypatch.setattr(row_exchange, "MAX_EXCHANGED_LOGITS", (6 // num_slabs) * VOCAB)
    logits, batch = rows(num_rows, seed=3)
    expected = RowOps().sample_batch(logits, batch).tolist()

    def on_rank(group):
        tokens = group.share_of(VOCAB)
        shard = VocabShard(group, tokens.start, VOCAB, ops)
        found = sample(logits[:, tokens.start : tokens.stop], batch, shard)
        return found.tolist(), group.called

    called = ["all_to_all", "all_gather"] * num_slabs
    assert run_ranks(2, on_rank) == [(expected, called)] * 2


def test_logits_of_another_division_are_refused():
    def on_rank(group):
        with pytest.raises(AssertionError):
            whole_rows(torch.zeros(2, 5), VocabShard(group, 5 * group.rank, 12))

    run_ranks(2, on_rank)
