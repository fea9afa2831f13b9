from dataclasses import replace

import pytest
import torch

from specdec.kernels.draws import row_peaks
from specdec.partition import partition
from specdec.sampling import whole_peaks
from tests.specdec.fakes import run_ranks

NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("row", "left", "expected"),
    [
        pytest.param([0, 1, 2], None, False, id="numbers"),
        pytest.param([0, -INF, -INF], None, False, id="some -inf"),
        pytest.param([-INF, -INF, -INF], None, True, id="nothing but -inf"),
        pytest.param([0, NAN, 2], None, True, id="a NaN"),
        pytest.param([0, 1, NAN], [0, 1, -INF], True, id="a NaN that is forbidden"),
        pytest.param([0, INF, 2], None, True, id="an inf"),
        pytest.param([0, INF, 2], [0, -INF, 2], True, id="an inf that is forbidden"),
        pytest.param([NAN, INF, -INF], None, True, id="all of them"),
        pytest.param([0, 1, 2], [-INF, -INF, 2], False, id="one is left"),
        pytest.param([0, 1, 2], [-INF, -INF, -INF], True, id="none is left"),
        pytest.param([3e38, 3e38, 3e38], None, False, id="large"),
    ],
)
def test_every_rank_knows_which_rows_are_bad(num_ranks, row, left, expected):
    logits = torch.tensor([[0.0, 1.0, 2.0], row])
    logits_left = logits if left is None else torch.tensor([[0.0, 1.0, 2.0], left])
    shares = partition(3, num_ranks)

    def of_rank(group):
        own = slice(shares[group.rank].start, shares[group.rank].stop)
        is_broken = row_peaks(logits[:, own]).is_broken
        peaks = replace(row_peaks(logits_left[:, own]), is_broken=is_broken)
        return whole_peaks(peaks, group, own.start).bad_rows

    assert run_ranks(num_ranks, of_rank) == [[False, expected]] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_knows_the_best_token_and_the_first_of_equals(num_ranks):
    logits = torch.tensor(
        [
            [0.0, 1.0, 5.0, 2.0, 5.0, 5.0, 1.0],
            [-INF, -INF, -INF, -INF, -INF, -7.0, -INF],
            [NAN, 3.0, -INF, 4.0, 2.0, 4.0, 0.0],
            [0.1, 0.25, 0.2, -1.0, 0.25, 0.25, 0.0],
        ]
    )
    shares = partition(7, num_ranks)

    def of_rank(group):
        share = shares[group.rank]
        peaks = whole_peaks(row_peaks(logits[:, share.start : share.stop]), group, share.start)
        return peaks.token_ids.tolist(), peaks.values.tolist(), peaks.is_broken.tolist()

    expected = [2, 5, 3, 1], [5.0, -7.0, 4.0, 0.25], [False, False, True, False]
    assert run_ranks(num_ranks, of_rank) == [expected] * num_ranks
