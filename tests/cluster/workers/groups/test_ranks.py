"""The actors of a group, on a Ray that records what is asked of it, and on a real one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from cluster.observability.logs import LogConfig
from cluster.workers.group_spec import GroupSpec, ModelSource, RankPlace
from cluster.workers.groups import ranks as ranks_module
from cluster.workers.groups.ranks import Ranks
from cluster.workers.rank.actor import DraftWorker
from cluster.workers.ray.resources import CPUS_PER_WORKER, DRAFT_BUNDLE
from specdec.config.engine import DraftLimits

LIMITS = DraftLimits(num_blocks=20, block_size=4, max_model_len=80, max_catch_up_tokens=16)
START_TIMEOUT_S = 150.0
PLACES = [RankPlace("here", 11, "3"), RankPlace("here", 12, "5")]


def spec_of(device="cpu", size=2):
    return GroupSpec(
        "draft model", ModelSource("m", Path("m")), "float32", device, None, "auto", size, LIMITS,
        1, DRAFT_BUNDLE, None, START_TIMEOUT_S, 60.0, LogConfig(),
    )  # fmt: skip


class RecordingRay:
    """Ray whose actors are named by rank, and whose calls return at once."""

    def __init__(self):
        self.options = None
        self.calls, self.made, self.killed = [], [], []
        self.is_placed = True
        self.util = SimpleNamespace(get_node_ip_address=lambda: "here")

    def remote(self, actor):
        def options(**values):
            self.options = values
            return SimpleNamespace(remote=self._make)

        return SimpleNamespace(options=options)

    def _make(self, *arguments):
        self.made.append(arguments)
        return Actor(self, arguments[1])

    def get(self, references, timeout=None):
        if not self.is_placed:
            raise GetTimeoutError
        return [PLACES[rank] if name == "place" else name for rank, name in references]

    def kill(self, actor):
        self.killed.append(actor.rank)


class Actor:
    """Handle whose methods record their calls."""

    def __init__(self, ray, rank):
        self._ray, self.rank = ray, rank

    def __getattr__(self, name):
        def remote(*arguments):
            self._ray.calls.append((self.rank, name))
            return self.rank, name

        return SimpleNamespace(remote=remote)


@pytest.fixture
def recording(monkeypatch):
    recording = RecordingRay()
    monkeypatch.setattr(ranks_module, "ray", recording)
    return recording


@pytest.mark.parametrize(("device", "num_gpus"), [("cpu", 0), ("cuda", 1)])
def test_spares_are_placed_with_the_others_and_reserve_nothing(recording, device, num_gpus):
    placement = object()
    ranks = Ranks(DraftWorker, spec_of(device), placement)
    reserved, own = recording.options, recording.made
    assert (reserved["num_cpus"], reserved["num_gpus"]) == (CPUS_PER_WORKER, num_gpus)
    assert [replaces for *_, replaces in own] == [None, None]
    recording.made = []
    spares = Ranks(DraftWorker, spec_of(device), placement, PLACES)
    assert (recording.options["num_cpus"], recording.options["num_gpus"]) == (0, 0)
    strategy = recording.options["scheduling_strategy"]
    assert strategy.placement_group is placement
    assert strategy.placement_group_bundle_index == DRAFT_BUNDLE
    assert [replaces for *_, replaces in recording.made] == PLACES
    for each in (ranks, spares):
        each.kill()


def test_only_the_owner_can_open_the_directory_of_the_sockets(recording):
    ranks = Ranks(DraftWorker, spec_of(), None)
    directory = recording.made[0][2]
    assert directory.stat().st_mode & 0o777 == 0o700
    ranks.kill()
    assert not directory.exists()
    assert recording.killed == [0, 1]


def test_spares_prepare_and_stand_by_before_they_run(recording):
    for replaces, expected in (
        ((), ["place", "bind", "run"]),
        (PLACES, ["place", "bind", "prepare", "stand_by", "run"]),
    ):
        recording.calls = []
        ranks = Ranks(DraftWorker, spec_of(), None, replaces)
        ranks.open(60.0)
        assert [name for rank, name in recording.calls if rank == 1] == expected
        assert ranks.places == PLACES
        ranks.kill()


def test_spares_that_are_not_placed_are_ended(recording):
    recording.is_placed = False
    with pytest.raises(TimeoutError, match=r"was not placed within 150\.0 s"):
        Ranks.opened(DraftWorker, spec_of(), None, PLACES)
    assert recording.killed == [0, 1]
