import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.truncation import (
    DeviceLimits,
    min_score,
    scaled_scores,
    truncation_floors,
)

# Tolerance of sums of float64 probabilities, for any order of addition.
TOLERANCE = 1e-12
ALONE = TensorParallelGroup()


def kept(
    logits: Tensor,
    top_k: list[int],
    top_p: list[float],
    min_p: list[float] | None = None,
    *,
    on_host: bool = False,
) -> Tensor:
    """Return the tokens that are kept at temperature 1."""
    min_scores = [min_score(each) for each in min_p or [0.0] * len(top_k)]
    limits = DeviceLimits(
        torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_scores)
    )
    scores = scaled_scores(logits, torch.ones(len(logits)), ALONE)
    return scores >= truncation_floors(scores, limits, on_host=on_host).unsqueeze(1)


def assert_is_support(
    mask: list[bool], logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    """Check the definition of min_p, top_k and top_p on sorted scores."""
    best = max(logits)
    scores = (torch.tensor(logits) - best).tolist()  # as float32, in which they are compared
    floor = min(score for score, is_kept in zip(scores, mask, strict=True) if is_kept)
    assert mask == [score >= floor for score in scores]

    ordered = sorted(scores, reverse=True)
    last = ordered[min(top_k or len(ordered), len(ordered)) - 1]
    if min_p:
        # Compared as float32, like all scores.
        least = torch.tensor(math.log(min_p)).item()
        last = min(score for score in scores if score >= max(last, least))
    ordered = [score for score in ordered if score >= last]
    if top_p == 1:
        assert floor == last
        return
    running = list(accumulate(math.exp(score) for score in ordered))
    num_better = sum(score > floor for score in ordered)
    assert running[sum(mask) - 1] >= top_p * running[-1] * (1 - TOLERANCE)
    assert num_better == 0 or running[num_better - 1] < top_p * running[-1] * (1 + TOLERANCE)


# Few distinct values make ties; wide ones make tiny probabilities.
logit = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(-30, 30, width=32),
    st.floats(-1e6, 1e6, width=32),
)
top_ks = st.one_of(st.just(0), st.integers(1, 12), st.just(10**9))
top_ps = st.one_of(
    st.just(1.0),
    st.floats(0.01, 0.999),
    st.sampled_from([1e-300, 1e-9, 0.5, 0.25, 1 - 2**-53, 1 - 1e-9]),
)


min_ps = st.one_of(st.just(0.0), st.floats(1e-300, 1.0))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(logit, min_size=1, max_size=200),
    st.lists(st.tuples(top_ks, top_ps, min_ps), min_size=1, max_size=4),
    st.booleans(),
)
def test_equals_sorting(logits, limits, on_host):
    top_k, top_p, min_p = (list(column) for column in zip(*limits, strict=True))
    rows = torch.tensor([logits] * len(limits))
    mask = kept(rows, top_k, top_p, min_p, on_host=on_host)
    for row, limit in enumerate(limits):
        assert_is_support(mask[row].tolist(), logits, *limit)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_sorting_on_large_vocabularies(spread, dtype, on_host):
    generator = torch.Generator().manual_seed(int(spread * 10))
    logits = (torch.randn(4, 5000, generator=generator) * spread).to(dtype).float()
    top_k, top_p = [0, 50, 50, 4999], [0.9, 1.0, 0.9, 0.99]
    min_p = [0.01, 0.001, 0.0, 0.1]
    mask = kept(logits, top_k, top_p, min_p, on_host=on_host)
    for row, (k, p, low) in enumerate(zip(top_k, top_p, min_p, strict=True)):
        assert_is_support(mask[row].tolist(), logits[row].tolist(), k, p, low)


@pytest.mark.parametrize(
    ("probs", "top_k", "top_p", "expected"),
    [
        pytest.param([0.5, 0.25, 0.125, 0.125], 0, 0.5, [1, 0, 0, 0], id="exactly reached"),
        pytest.param([0.5, 0.25, 0.125, 0.125], 0, 0.51, [1, 1, 0, 0], id="just above"),
        pytest.param([0.5, 0.25, 0.125, 0.125], 0, 0.8, [1, 1, 1, 1], id="tie with the last"),
        pytest.param([0.25, 0.25, 0.25, 0.25], 0, 0.1, [1, 1, 1, 1], id="all tied"),
        pytest.param([0.125, 0.5, 0.125, 0.25], 1, 1.0, [0, 1, 0, 0], id="top_k of 1"),
        pytest.param([0.125, 0.5, 0.125, 0.25], 3, 1.0, [1, 1, 1, 1], id="top_k tie"),
        pytest.param([0.125, 0.5, 0.125, 0.25], 9, 1.0, [1, 1, 1, 1], id="top_k > vocabulary"),
        pytest.param([0.5, 0.25, 0.125, 0.125], 2, 0.7, [1, 1, 0, 0], id="share of top_k"),
        pytest.param([0.5, 0.25, 0.125, 0.125], 2, 0.6, [1, 0, 0, 0], id="renormalised"),
    ],
)
def test_hand_computed_cases(probs, top_k, top_p, expected):
    mask = kept(torch.tensor([probs]).log(), [top_k], [top_p])
    assert mask[0].int().tolist() == expected


@pytest.mark.parametrize("min_p", [0.001, 0.1, 0.7, 1.0])
def test_min_p_equals_transformers(min_p):
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(2)) * 3
    expected = MinPLogitsWarper(min_p)(None, logits).isfinite()
    assert torch.equal(kept(logits, [0] * 4, [1.0] * 4, [min_p] * 4), expected)


def test_rows_are_independent():
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(1)) * 3
    top_k, top_p = [0, 5, 0, 40, 0, 700], [1.0, 1.0, 0.7, 0.5, 1.0, 0.999]
    together = kept(logits, top_k, top_p)
    alone = [kept(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1]) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))
    assert together[0].all()


def test_a_row_without_scores_is_unchanged():
    logits = torch.full((3, 10), -torch.inf)
    assert kept(logits, [3, 0, 3], [1.0, 0.5, 0.5]).shape == (3, 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_a_copy_of_any_float_type(dtype):
    logits = torch.randn(2, 100).to(dtype)
    before = logits.clone()
    assert scaled_scores(logits, torch.tensor([0.5, 2.0]), ALONE).dtype == torch.float32
    assert torch.equal(logits, before)


def test_nan_counts_as_minus_infinity():
    logits = torch.tensor([[torch.nan, 1.0, -torch.inf, torch.nan], [torch.nan] * 4])
    scores = scaled_scores(logits, torch.tensor([0.7, 0.7]), ALONE)
    assert scores[0].tolist() == [-torch.inf, 0.0, -torch.inf, -torch.inf]
    assert torch.isneginf(scores[1]).all()


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1.0, 100.0])
def test_scores_are_at_most_zero_and_never_nan(temperature):
    logits = torch.tensor([[1e30, 5.0, -3e38, -torch.inf], [3.0, 3.0, 2.0, torch.inf]])
    scores = scaled_scores(logits, torch.tensor([temperature] * 2), ALONE)
    assert not scores.isnan().any()
    assert (scores.amax(1) == 0).all()
