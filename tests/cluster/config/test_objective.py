"""Objectives as texts."""

import pytest

from cluster.config.objective import Objective
from specdec.types.errors import InvalidValueError


def test_milliseconds_become_seconds():
    assert Objective.parse("ttft:2000 tpot:40") == Objective(2.0, 0.04)
    assert Objective.parse("tpot:1  ttft:3600000") == Objective(3600.0, 0.001)


@pytest.mark.parametrize(
    "text",
    [
        *("", "ttft:2000", "ttft:2000 tpot", "ttft:2000 tpot:40 e2e:1", "ttft:2000 tpot:-1"),
        *("ttft:2000 tpot:40 tpot:50", "ttft:nan tpot:40", "ttft:inf tpot:40", "2000 40"),
        *("ttft:1e-200 tpot:40", "ttft:2000 tpot:0.9", "ttft:3600001 tpot:40"),
    ],
)
def test_others_are_refused_with_an_example(text):
    with pytest.raises(InvalidValueError, match="from 1 to 3600000 such as ttft:2000 tpot:40"):
        Objective.parse(text)
