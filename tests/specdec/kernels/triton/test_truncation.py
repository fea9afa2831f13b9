# Modules: specdec.kernels.triton.device.truncation, specdec.kernels.triton.device.truncation_rounds
"""Reference tests: the floors of truncation keep the tokens that `specdec.sampling` keeps."""

import math

import pytest
import torch

from specdec.config.gpu.truncation_search import MAX_CANDIDATES
from specdec.kernels.reference.sample_rows import RowSampling
from specdec.kernels.triton import truncation
from specdec.kernels.triton.sample import TileArgmax
from specdec.sampling.truncation import DeviceLimits, min_score, truncation_floors

TOP_P_ERROR = 1e-5


def sampling_of(temperatures, top_k, top_p, min_p):
    integers = torch.zeros(len(temperatures), dtype=torch.int64)
    return RowSampling(
        torch.tensor(temperatures),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor([min_score(each) for each in min_p]),
        *[integers] * 3,
    )


def floors_of(logits, sampling):
    tiles = TileArgmax(logits)
    best = tiles.reduce().values
    return truncation.truncation_floors(logits, tiles.best, best, sampling.limits)


def scores_of(logits, sampling):
    """Return the scores of rows that are sampled, [R, vocab_size] float32."""
    logits = logits.float()
    return (logits - logits.amax(1, keepdim=True)) / sampling.temperatures[:, None]


def assert_keeps_the_same(logits, sampling):
    """Compare what is kept, except for tokens that a top_p changed by TOP_P_ERROR may add."""
    scores, floors = scores_of(logits, sampling), floors_of(logits, sampling)
    kept = (scores >= floors[:, None]).sum(1)
    changed = [
        truncation_floors(
            scores,
            DeviceLimits(
                sampling.top_k,
                torch.where(sampling.top_p < 1, sampling.top_p + error, sampling.top_p),
                sampling.min_scores,
            ),
        )
        for error in (-TOP_P_ERROR, TOP_P_ERROR)
    ]
    fewest, most = ((scores >= each[:, None]).sum(1) for each in changed)
    assert ((fewest <= kept) & (kept <= most)).all(), (fewest, kept, most)
    # A floor is the score of a token, if it removes any.
    is_cut = (kept < logits.shape[1]) & (sampling.top_k + (sampling.top_p < 1) > 0)
    assert (scores == floors[:, None]).any(1)[is_cut & (sampling.min_scores == -torch.inf)].all()


def normal(num_rows, vocab, spread, seed=0):
    return spread * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


LIMITS = [
    ([1, 5, 300, 2500, 10**9], [1.0] * 5, [0.0] * 5),
    ([0] * 5, [1e-6, 0.1, 0.5, 0.9, 0.999], [0.0] * 5),
    ([0, 5, 50, 0, 300], [1.0, 0.5, 0.9, 0.3, 0.3], [0.5, 0.0, 0.01, 0.2, 1e-6]),
]


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS)
def test_rows_keep_the_tokens_of_the_reference(limits):
    logits = normal(5, 2600, torch.tensor([[3.0], [0.01], [3.0], [1.0], [1000.0]]))
    assert_keeps_the_same(logits, sampling_of([0.8, 1.0, 0.3, 1.5, 1.0], *limits))


def test_equal_scores_are_kept_together():
    logits = torch.zeros(2, 100)
    logits[:, :10] = 1.0
    floors = floors_of(logits, sampling_of([0.8] * 2, [3, 101], [1.0] * 2, [0.0] * 2))
    assert floors.tolist() == [0.0, -math.inf]


def test_rows_without_limits_have_the_floor_of_min_p():
    logits = normal(3, 100, 3.0)
    floors = floors_of(logits, sampling_of([0.0, 0.8, 0.8], [5, 0, 0], [0.5, 1, 1], [0.1, 0.1, 0]))
    assert floors.tolist() == pytest.approx([-math.inf, math.log(0.1), -math.inf])


@pytest.mark.slow
def test_rows_of_a_wider_matrix_and_in_half_precision():
    """A vocabulary that ends within a tile, with better logits after it."""
    wide = normal(2, 2304, 3.0).half()
    wide[:, 2060:] = 50.0
    assert_keeps_the_same(wide[:, :2060], sampling_of([0.8, 1.2], [50, 0], [0.9, 0.9], [0, 0]))


def test_a_row_without_a_finite_logit_keeps_its_floor():
    logits = torch.full((1, 100), -torch.inf)
    assert floors_of(logits, sampling_of([1.0], [5], [1.0], [0.0])).tolist() == [-math.inf]


def test_no_rows_have_no_floors():
    assert floors_of(torch.empty(0, 100), sampling_of([], [], [], [])).shape == (0,)


@pytest.mark.slow
def test_fewer_tokens_than_top_k_are_all_kept():
    """One row has masked tokens, and in one min_p leaves fewer than top_k."""
    logits = normal(3, 2100, 3.0)
    logits[0, 4:] = -torch.inf
    floors = floors_of(logits, sampling_of([1.0] * 3, [50] * 3, [1.0, 1.0, 0.9], [0, 0.5, 0.5]))
    assert floors.tolist() == pytest.approx([-math.inf, math.log(0.5), floors[2].item()])
    scores = (logits - logits.amax(1, keepdim=True))[2]
    assert floors[2] in scores
    assert floors[2] >= math.log(0.5)


@pytest.mark.slow
def test_rows_with_more_candidates_than_fit_are_searched_in_passes():
    """With equal scores, and with a top_k beyond MAX_CANDIDATES before top_p."""
    vocab = 2 * MAX_CANDIDATES
    logits = normal(3, vocab, 1.0)
    logits[:2] = logits[:2].round()
    logits[:2, : MAX_CANDIDATES + 1] = 0.0
    limits = ([0, 3000, MAX_CANDIDATES + 100], [0.9, 1.0, 0.9], [0.0] * 3)
    assert_keeps_the_same(logits, sampling_of([1.0] * 3, *limits))


@pytest.mark.slow
def test_floors_do_not_depend_on_the_batch(monkeypatch):
    """Nor on the number of programs that a row has."""
    logits = normal(4, 4500, 3.0)
    columns = ([1.0, 0.0, 0.7, 1.0], [0, 5, 50, 0], [0.9, 0.5, 0.95, 0.5], [0.0, 0.0, 0.0, 0.01])
    together = floors_of(logits, sampling_of(*columns))
    monkeypatch.setattr(truncation, "_PROGRAMS", 1)
    for row in (0, 2, 3):
        alone = floors_of(logits[row : row + 1], sampling_of(*([c[row]] for c in columns)))
        assert torch.equal(alone, together[row : row + 1])
