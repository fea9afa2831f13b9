"""Tests of the distances from fp32 distributions, computed by hand."""

import math

import pytest
import torch

from benchmarks.precision import distance


def log_probs(*rows):
    return torch.tensor(rows).log()


def test_distances_are_over_all_tokens():
    expected = [log_probs([0.75, 0.25]), log_probs([0.9, 0.1], [0.2, 0.8])]
    found = [log_probs([0.25, 0.75]), log_probs([0.9, 0.1], [0.2, 0.8])]
    result = distance("int8", expected, found)
    assert result.precision == "int8"
    assert result.kl_divergence == pytest.approx(0.5 * math.log(3) / 3)
    assert result.total_variation == pytest.approx(0.5 / 3)
    assert result.most_total_variation == pytest.approx(0.5)
    assert result.num_agreeing == 2
