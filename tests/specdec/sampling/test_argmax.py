# Modules: specdec.sampling.vocab_shard
from dataclasses import replace

import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.kernels.sample import torch_row_argmax as row_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.vocab_shard import VocabShard, all_ranks_argmax
from tests.specdec.fakes import run_ranks
from tests.specdec.kernels.cpu.test_shared_memory import join
from tests.specdec.processes import results, run_processes

NAN, INF = torch.nan, torch.inf

needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")


# A row, the row after masking, and whether it is invalid.
ROWS = [
    pytest.param([0, 1, 2], None, False, id="numbers"),
    pytest.param([0, -INF, -INF], None, False, id="some -inf"),
    pytest.param([-INF, -INF, -INF], None, True, id="nothing but -inf"),
    pytest.param([0, NAN, 2], None, True, id="a NaN"),
    pytest.param([0, 1, NAN], None, True, id="a NaN at the end"),
    pytest.param([0, 1, NAN], [0, 1, -INF], True, id="a NaN that is forbidden"),
    pytest.param([0, INF, 2], None, True, id="an inf"),
    pytest.param([0, INF, 2], [0, -INF, 2], True, id="an inf that is forbidden"),
    pytest.param([NAN, INF, -INF], None, True, id="all of them"),
    pytest.param([0, 1, 2], [-INF, -INF, 2], False, id="one is left"),
    pytest.param([0, 1, 2], [-INF, -INF, -INF], True, id="none is left"),
    pytest.param([3e38, 3e38, 3e38], None, False, id="large"),
]


def invalid_rows(group, row, left):
    share = group.share_of(len(row))
    own = slice(share.start, share.stop)
    logits = torch.tensor([[0.0, 1.0, 2.0], row])
    logits_left = logits if left is None else torch.tensor([[0.0, 1.0, 2.0], left])
    has_nan = row_argmax(logits[:, own]).has_nan
    argmax = replace(row_argmax(logits_left[:, own]), has_nan=has_nan)
    return all_ranks_argmax(argmax, VocabShard(group, own.start, len(row))).invalid_rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("row", "left", "expected"), ROWS)
def test_every_rank_detects_invalid_rows(num_ranks, row, left, expected):
    found = run_ranks(num_ranks, lambda group: invalid_rows(group, row, left))
    assert found == [[False, expected]] * num_ranks


LOGITS = torch.tensor(
    [
        [0.0, 1.0, 5.0, 2.0, 5.0, 5.0, 1.0],
        [-INF, -INF, -INF, -INF, -INF, -7.0, -INF],
        [NAN, 3.0, -INF, 4.0, 2.0, 4.0, 0.0],
        [0.1, 0.25, 0.2, -1.0, 0.25, 0.25, 0.0],
        [1.0, 3.0, 2.0, 0.0, 0.0, 0.0, NAN],
        [-INF, -INF, -INF, -INF, -INF, -INF, -INF],
    ]
)
BEST = (
    [2, 5, 3, 1, 1, 0],
    [5.0, -7.0, 4.0, 0.25, 3.0, -INF],
    [False, False, True, False, True, False],
)


def best_of_ranks(group):
    share = group.share_of(LOGITS.shape[1])
    own = row_argmax(LOGITS[:, share.start : share.stop])
    before = own.token_ids.tolist()
    argmax = all_ranks_argmax(own, VocabShard(group, share.start, LOGITS.shape[1]))
    assert own.token_ids.tolist() == before
    return argmax.token_ids.tolist(), argmax.values.tolist(), argmax.has_nan.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_finds_the_first_best_token(num_ranks):
    assert run_ranks(num_ranks, best_of_ranks) == [BEST] * num_ranks


def argmax_of_rank(rank, size, directory):
    group = TensorParallelGroup(rank, size, join(rank, size, directory))
    group.collectives.all_gather = None  # it is one call of the kernels
    return best_of_ranks(group), [invalid_rows(group, *each.values[:2]) for each in ROWS]


@needs_compiler
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shared_memory_gives_the_same_result(tmp_path, num_ranks):
    are_bad = [[False, each.values[2]] for each in ROWS]
    found = results(run_processes(num_ranks, argmax_of_rank, tmp_path))
    assert found == [(BEST, are_bad)] * num_ranks


def lose_a_rank(rank, size, directory):
    group = TensorParallelGroup(rank, size, join(rank, size, directory))
    if rank == 1:
        group.collectives.close()
        return None
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        best_of_ranks(group)


@needs_compiler
def test_a_rank_that_exits_raises_an_error(tmp_path):
    results(run_processes(2, lose_a_rank, tmp_path))
