"""A ControlPlane with a fake clock."""

import pytest

from cluster.control.overrides import OverrideLimits
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from specdec.types.control import SpeculationControl
from tests.clock import Clock

CONFIGURED = SpeculationControl("auto", threshold=32, num_speculative_tokens=3)
LIMITS = OverrideLimits(("draft_model", "ngram"))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    def make(configured=CONFIGURED, limits=LIMITS):
        store = ControlStore(tmp_path, "tiny")
        return ControlPlane(
            configured,
            store,
            limits=limits,
            clock=clock,
            wall_clock=lambda: 1e9 - 100 + clock.now_s,
        )

    return make


@pytest.fixture
def plane(make):
    return make()
