"""The actors of a group, on a Ray that records what is asked of it, and on a real one."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError

from cluster.observability.logs import LogConfig
from cluster.workers.group_spec import GroupSpec, ModelSource, Peers, RankPlace
from cluster.workers.groups import ranks as ranks_module
from cluster.workers.groups.ranks import RankLoss, Ranks
from cluster.workers.rank.actor import DraftWorker, TargetWorker
from cluster.workers.ray.resources import CPUS_PER_WORKER
from specdec.config.engine import DraftLimits
from specdec.types.errors import ModelNotFoundError

LIMITS = DraftLimits(num_blocks=20, block_size=4, max_model_len=80, max_catch_up_tokens=16)
START_TIMEOUT_S = 150.0
PLACES = [RankPlace("here", "a", 11, "3"), RankPlace("here", "a", 12, "5")]


def spec_of(device="cpu", size=2):
    return GroupSpec(
        "draft model", ModelSource("m", Path("m")), "float32", device, None, "auto", size, LIMITS,
        1, (2,) * size, None, START_TIMEOUT_S, 60.0, LogConfig(),
    )  # fmt: skip


class RecordingRay:
    """Ray whose actors are named by rank, and whose calls return at once."""

    def __init__(self):
        self.options = None
        self.calls, self.made, self.killed = [], [], []
        self.places, self.peers, self.bundles = PLACES, [], []
        self.is_placed = True
        self.now_s, self.call_s = 0.0, 0.0
        self.ended = {}  # the errors of runs that have ended, by rank
        self.util = SimpleNamespace(get_node_ip_address=lambda: "here")

    def remote(self, actor):
        def options(**values):
            self.options = values
            self.bundles.append(values["scheduling_strategy"].placement_group_bundle_index)
            return SimpleNamespace(remote=self._make)

        return SimpleNamespace(options=options)

    def _make(self, *arguments):
        self.made.append(arguments)
        return Actor(self, arguments[1])

    def get(self, references, timeout=None):
        if isinstance(references, tuple):  # one run
            raise self.ended[references[0]]
        self.now_s += self.call_s
        if not self.is_placed or self.call_s > timeout:
            raise GetTimeoutError
        return [self._result(rank, name) for rank, name in references]

    def wait(self, runs, num_returns, timeout):
        ended = [each for each in runs if each[0] in self.ended]
        return ended[:num_returns], runs

    def monotonic(self):
        return self.now_s

    def _result(self, rank, name):
        if name == "place":
            return self.places[rank]
        listens = name == "listen_for_peers"
        return [f"{rank} for {other}" for other in range(rank + 1, 3)] if listens else name

    def kill(self, actor):
        self.killed.append(actor.rank)


class Actor:
    """Handle whose methods record their calls."""

    def __init__(self, ray, rank):
        self._ray, self.rank = ray, rank

    def __getattr__(self, name):
        def remote(*arguments):
            self._ray.calls.append((self.rank, name))
            if name == "run":
                self._ray.peers += arguments
            return self.rank, name

        return SimpleNamespace(remote=remote)


@pytest.fixture
def recording(monkeypatch):
    recording = RecordingRay()
    monkeypatch.setattr(ranks_module, "ray", recording)
    monkeypatch.setattr(ranks_module, "time", recording)
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
    assert strategy.placement_group_bundle_index == 2
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


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", [Peers(2), Peers(2, ("0 for 1",)), Peers(1, ("0 for 2", "1 for 2"))]),
        ("cuda", [Peers(each, store="open_store") for each in (2, 2, 1)]),
    ],
)
def test_ranks_on_several_nodes_learn_where_to_meet(recording, device, expected):
    """Each knows how many share its cores, and where those before it listen for it."""
    recording.places = [RankPlace("here", each, 1, None) for each in ("a", "a", "b")]
    spec = replace(spec_of(device, 3), bundles=(1, 2, 3))
    Ranks.opened(TargetWorker, spec, None).kill()
    assert recording.bundles == [1, 2, 3]
    assert recording.peers == expected


def test_ranks_on_one_node_need_no_connections(recording):
    recording.places = [replace(each, address=str(each.pid)) for each in PLACES]
    Ranks.opened(DraftWorker, spec_of(), None).kill()
    assert recording.peers == [Peers(2), Peers(2)]
    assert {name for _, name in recording.calls} == {"place", "bind", "run"}


def test_spares_that_are_not_placed_are_ended(recording):
    recording.is_placed = False
    with pytest.raises(TimeoutError, match=r"was not placed within 150\.0 s"):
        Ranks.opened(DraftWorker, spec_of(), None, PLACES)
    assert recording.killed == [0, 1]


def test_all_phases_have_one_deadline_and_the_error_names_the_phase(recording):
    recording.places = [replace(each, node=str(each.pid)) for each in PLACES]
    for call_s, missing in ((100.0, "step sockets"), (60.0, "the sockets between its ranks")):
        recording.call_s = call_s
        with pytest.raises(TimeoutError, match=rf"did not open .*{missing} within 150\.0 s"):
            Ranks.opened(TargetWorker, spec_of(), None)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_loss_is_that_of_the_rank_with_an_error_for_users(recording, rank):
    """Other ranks then fail because this one is missing."""
    ranks = Ranks.opened(TargetWorker, spec_of(), None)
    assert ranks.loss() is None
    symptom, cause = RuntimeError("rank has ended"), ModelNotFoundError("no file of weights")
    for each, error in ((1 - rank, symptom), (rank, cause)):
        recording.ended[each] = RayTaskError("run", "", error)
        loss = ranks.loss()
    assert loss == RankLoss(rank, "ended: no file of weights", cause)
    ranks.kill()
