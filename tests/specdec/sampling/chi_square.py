"""Chi-square tests of counts against a distribution."""

from __future__ import annotations

import numpy as np
from scipy import stats

# Seeds are fixed, so a test that passes once always passes. For a correct sampler, each of the
# fewer than 100 seeds had a chance of one in a million to fail when it was chosen.
FALSE_ALARM = 1e-6
_LEAST_EXPECTED = 5


def chi_square_p_value(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Return the p-value of Pearson's test; bins with expectations below 5 are merged.

    Counts of impossible values give 0.
    """
    counts = np.bincount(tokens, minlength=len(probs))
    if counts[probs == 0].any():
        return 0.0
    counts, expected = _merged(counts, probs * len(tokens))
    return float(stats.chisquare(counts, expected).pvalue)


def _merged(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rare = expected < _LEAST_EXPECTED
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < _LEAST_EXPECTED:
        counts = np.append(counts[:-2], counts[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    return counts, expected


def chi_square_excess(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Return the standard deviations of Pearson's statistic above its mean, the degrees of freedom.

    For many bins it is nearly normal: 10 is out of reach by chance. Where what cannot come did, it
    is infinite.
    """
    counts = np.bincount(tokens, minlength=len(probs))
    if counts[probs == 0].any():
        return np.inf
    counts, expected = _merged(counts, probs * len(tokens))
    freedom = len(counts) - 1
    statistic = float(stats.chisquare(counts, expected).statistic)
    return (statistic - freedom) / (2 * freedom) ** 0.5


def total_variation(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Return the total variation distance of counts and expectation, from 0 to 1."""
    shares = np.bincount(tokens, minlength=len(probs)) / len(tokens)
    return float(np.abs(shares - probs).sum() / 2)
