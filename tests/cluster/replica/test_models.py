"""The models of a replica: what they are started with, and what happens when one is lost."""

import threading

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.replica.models import ReplicaModels
from cluster.workers.model_source import ModelSource
from cluster.workers.resources import DRAFT_BUNDLE, TARGET_BUNDLE
from specdec.config.speculative import SpeculativeConfig
from specdec.engine.memory_plan import memory_plan
from specdec.engine.model_resolution import ModelDirectories
from specdec.types.counters import ModelCounts
from specdec.types.errors import DraftFailedError, TargetFailedError

PLACEMENT = object()


class Group:
    """Ranks that do nothing but live, until they are told to fail."""

    num_ranks = 1
    is_busy = False

    def __init__(self, spec, placement):
        assert placement is PLACEMENT
        self.spec = spec
        self.error = None
        self.is_killed = self.is_closed = False

    def check_alive(self):
        if self.error is not None:
            raise self.error

    def kill(self):
        self.is_killed = True

    def close(self):
        self.is_closed = True


class Loop:
    """Does at once what it is handed."""

    def __init__(self):
        self.lost = []

    def post(self, function):
        function()

    def lose_target(self, error):
        self.lost.append(error)


class Started:
    """The groups of each role, in the order in which they were made."""

    def __init__(self):
        self.target, self.draft = [], []
        self.target_error = None

    def make_target(self, spec, placement):
        if self.target_error is not None:
            raise self.target_error
        self.target.append(Group(spec, placement))
        return self.target[-1]

    def make_draft(self, spec, placement):
        self.draft.append(Group(spec, placement))
        return self.draft[-1]


@pytest.fixture
def started(monkeypatch):
    started = Started()
    monkeypatch.setattr("cluster.replica.models.TargetGroup", started.make_target)
    monkeypatch.setattr("cluster.replica.models.DraftGroup", started.make_draft)
    return started


def models_of(directory, speculation, **settings):
    config = ServeConfig(
        model=str(directory), max_model_len=128, speculative_config=speculation, **settings
    )
    drafts = speculation is not None and speculation.method == "draft_model"
    directories = ModelDirectories(directory, directory if drafts else None)
    return ReplicaModels(config, directories, memory_plan(config, directories.configs(), 2**33))


@pytest.fixture
def models(tiny_model_dir, started):
    speculation = SpeculativeConfig.of("draft_model", 3, quantization="int8")
    return models_of(tiny_model_dir, speculation, quantization="int8", transport="tcp")


async def test_both_are_started_as_they_are_configured(models, started, tiny_model_dir):
    await models.start(PLACEMENT)
    target, draft = started.target[0].spec, started.draft[0].spec
    assert (target.name, draft.name) == ("target", "draft model")
    assert (target.bundle_index, draft.bundle_index) == (TARGET_BUNDLE, DRAFT_BUNDLE)
    assert target.model == draft.model == ModelSource(str(tiny_model_dir), tiny_model_dir)
    assert (target.quantization, draft.quantization) == ("int8", "int8")
    assert (target.transport, draft.transport) == ("tcp", "tcp")
    assert (target.step_timeout_s, draft.step_timeout_s) == (60.0, 10.0), "streams wait for drafts"
    assert models.target is started.target[0]
    assert list(models.profiled) == ["target", "draft model"]
    assert models.counts == ModelCounts()
    await models.close()
    assert started.target[0].is_closed
    assert started.draft[0].is_closed


async def test_they_start_at_the_same_time(models, started, monkeypatch):
    """Neither is made before the other one is being made."""
    both = threading.Barrier(2, timeout=10)

    def meeting(make):
        return lambda *args: (both.wait(), make(*args))[1]

    monkeypatch.setattr("cluster.replica.models.TargetGroup", meeting(started.make_target))
    monkeypatch.setattr("cluster.replica.models.DraftGroup", meeting(started.make_draft))
    await models.start(PLACEMENT)
    assert (len(started.target), len(started.draft)) == (1, 1)
    await models.close()


async def test_a_draft_model_beside_a_target_that_does_not_start_is_ended(models, started):
    started.target_error = TargetFailedError("no memory")
    with pytest.raises(TargetFailedError, match="no memory"):
        await models.start(PLACEMENT)
    await models.close()
    assert started.draft[0].is_closed


async def test_the_loop_hears_of_a_target_that_died_unnoticed(models, started):
    await models.start(PLACEMENT)
    loop = Loop()
    await models.check(loop)
    assert loop.lost == []
    error = started.target[0].error = TargetFailedError("rank 0 died")
    await models.check(loop)
    assert loop.lost == [error]
    assert models.remake_target() is models.target is started.target[1]
    assert started.target[0].is_killed
    assert models.counts.num_target_restarts == 1
    await models.close()


@pytest.mark.parametrize("fallback", [None, "ngram"])
async def test_without_its_draft_model_a_replica_drafts_by_lookup_or_not_at_all(
    tiny_model_dir, started, monkeypatch, fallback
):
    speculation = SpeculativeConfig.of("draft_model", 3, quantization="int8", fallback=fallback)
    models = models_of(tiny_model_dir, speculation)
    await models.start(PLACEMENT)
    assert (models.is_draft_up, models.can_draft) == (True, True)
    monkeypatch.setattr(
        "cluster.workers.draft_supervisor.DraftSupervisor._restart", lambda self: None
    )
    started.draft[0].error = DraftFailedError("it died")
    await models.check(Loop())
    assert started.draft[0].is_killed
    assert (models.is_draft_up, models.can_draft) == (False, fallback is not None)
    await models.close()


@pytest.mark.parametrize(
    ("speculation", "drafts"), [(None, False), (SpeculativeConfig.of("ngram"), True)]
)
async def test_a_replica_without_a_draft_model(tiny_model_dir, started, speculation, drafts):
    models = models_of(tiny_model_dir, speculation)
    await models.start(PLACEMENT)
    assert started.draft == []
    assert (models.make_proposer() is not None) is drafts
    assert models.is_draft_up is None
    assert list(models.profiled) == ["target"]
    await models.close()


def test_before_they_are_started_there_is_nothing_to_tell(models):
    assert models.counts == ModelCounts()
    assert models.is_draft_up is None
    with pytest.raises(AssertionError, match="not been started"):
        models.remake_target()
