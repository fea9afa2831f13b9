"""Test data of the matrix tests."""

import torch


def random_tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_with_outliers(num_rows, in_features):
    """Return random rows, one of them much larger, one much smaller, one of zeros."""
    x = random_tensor(num_rows, in_features, seed=1)
    for row, factor in zip(range(num_rows), (1.0, 1000.0, 0.0, 1e-6), strict=False):
        x[row] *= factor
    return x


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()
