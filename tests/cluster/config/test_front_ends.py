"""The number of front-end processes."""

import pytest

from cluster.config import front_ends
from cluster.config.serve_config import ServeConfig
from specdec.types.errors import InvalidValueError


def config(**values):
    return ServeConfig(model="m", **values)


@pytest.mark.parametrize(
    ("num_cores", "expected"), [(4, 0), (7, 0), (8, 2), (15, 2), (16, 4), (128, 4)]
)
def test_a_gpu_has_as_many_as_its_machine_has_room_for(monkeypatch, num_cores, expected):
    monkeypatch.setattr(front_ends, "available_cpus", lambda: num_cores)
    assert front_ends.front_end_count("auto", "cuda") == expected
    assert front_ends.front_end_count("auto", "cpu") == 0


@pytest.mark.parametrize("given", [3, "3"])
def test_a_given_number_is_that_of_any_machine(given):
    assert config(frontends=given, device="cpu").num_front_ends == 3


def test_serves_proxies_and_a_seed_leave_none():
    assert config(frontends=3, ingress="serve").num_front_ends == 0
    assert config(frontends=3, seed=1).num_front_ends == 0


@pytest.mark.parametrize("given", [-1, 17, "many", "", True, 1.0, None])
def test_any_other_value_is_an_error(given):
    with pytest.raises(InvalidValueError, match=r"frontends is .*; it must be auto, or a whole"):
        config(frontends=given)
