"""Matrices of parameters, of which `make test` runs the fewest cases that have every value."""

from itertools import product

import pytest


def every_value(first, *axes, slow=()):
    """Return all combinations as parameters, most of them marked slow.

    The others take one value of each axis in turn, until the longest axis ends. slow: further
    values of the first axis, whose cases are all slow. A tuple stands for several parameters.
    """
    lengths = [len(first), *map(len, axes)]
    quick = {tuple(place % length for length in lengths) for place in range(max(lengths))}
    cases = []
    for places_and_values in product(*map(enumerate, ([*first, *slow], *axes))):
        places, values = zip(*places_and_values, strict=True)
        parameters = (each if isinstance(each, tuple) else (each,) for each in values)
        marks = () if places in quick else pytest.mark.slow
        cases.append(pytest.param(*(one for each in parameters for one in each), marks=marks))
    return cases
