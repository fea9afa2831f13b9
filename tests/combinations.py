"""Matrices of parameters, of which `make test` runs the fewest cases that have every value."""

from itertools import product

import pytest


def every_value(first, *axes, slow=()):
    """Return all combinations as parameters, most of them marked slow.

    The others take one value of each axis in turn, until the longest axis ends. slow: further
    values of the first axis, whose cases are all slow. A tuple stands for several parameters. The
    keys of a dictionary are the names of its values in the cases' ids.
    """
    lengths = [len(first), *map(len, axes)]
    quick = {tuple(place % length for length in lengths) for place in range(max(lengths))}
    cases = []
    for each in product(*map(enumerate, ([*named(first), *named(slow)], *map(named, axes)))):
        places, names_and_values = zip(*each, strict=True)
        names, values = zip(*names_and_values, strict=True)
        marks = () if places in quick else pytest.mark.slow
        parameters = (one for value in values for one in parameters_of(value))
        cases.append(pytest.param(*parameters, marks=marks, id="-".join(names)))
    return cases


def parameters_of(value):
    return value if isinstance(value, tuple) else (value,)


def named(axis):
    """Return pairs of name and value."""
    if isinstance(axis, dict):
        return [*axis.items()]
    return [("-".join(map(str, parameters_of(value))), value) for value in axis]
