# Modules: cluster.replica.group_specs
"""The Ray executor: the configuration of its worker groups, and their loss."""

import threading
from types import SimpleNamespace

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.replica.ray_executor import RayExecutor, ReplicaExecutor
from cluster.workers.group_spec import HeadSpec, ModelSource, RankPlace
from cluster.workers.groups.roles import DRAFT
from cluster.workers.rank.actor import DraftWorker
from cluster.workers.shared_draft.draft_seats import Seat
from cluster.workers.transport.transport import Endpoint
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.llm.local_executor import LocalExecutor
from specdec.speculation.proposers.target_head import TargetHeadProposer
from specdec.types.drafts.draft_decision import DraftAhead
from specdec.types.errors import DraftFailedError, InvalidValueError, TargetFailedError
from specdec.types.reports.stats import Counts
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.tiny import shuffled_llama_dir

PLACEMENT = object()


class Group:
    """Worker group that is alive until `error` is set."""

    num_ranks = 1
    poll_busy = poll_late = lambda self: False

    def __init__(self, spec, placement):
        assert placement is PLACEMENT
        self.spec = spec
        self.ranks = SimpleNamespace(places=[RankPlace("here", "a", 7, None)])
        self.error = None
        self.is_killed = self.is_closed = False

    def check_alive(self):
        if self.error is not None:
            raise self.error

    def keep_seats(self):
        """Its ranks have none."""

    def kill(self):
        self.is_killed = True

    def close(self):
        self.is_closed = True


class Loop:
    """Engine loop that runs functions immediately."""

    def __init__(self):
        self.lost = []

    def post(self, function):
        function()

    def mark_target_lost(self, error):
        self.lost.append(error)


class Started:
    """The groups of each role, in the order in which they were made; the spares' arguments."""

    def __init__(self):
        self.target, self.draft, self.spares = [], [], []
        self.target_error = None
        self.has_spare = threading.Event()

    def make_spares(self, actor, spec, placement, replaces):
        assert placement is PLACEMENT
        self.spares.append((actor, spec, replaces))
        self.has_spare.set()
        return SimpleNamespace(kill=lambda: None, loss=lambda: None)

    def make_target(self, spec, placement):
        if self.target_error is not None:
            raise self.target_error
        self.target.append(Group(spec, placement))
        return self.target[-1]

    def make_draft(self, role, spec, placement, spare=None):
        assert role is DRAFT
        self.draft.append(Group(spec, placement))
        return self.draft[-1]


@pytest.fixture
def started(monkeypatch):
    started = Started()
    monkeypatch.setattr("cluster.workers.groups.target_group.TargetGroup", started.make_target)
    monkeypatch.setattr("cluster.workers.groups.target_group.AdapterGroup", started.make_draft)
    monkeypatch.setattr("cluster.workers.groups.ranks.Ranks.opened", started.make_spares)
    yield started
    for thread in threading.enumerate():
        if thread.name == "spare-ranks":  # else it would call the functions of another test
            thread.join(30)


def models_of(directory, speculation, head=None, **settings):
    config = ServeConfig(
        model=str(directory), max_model_len=128, speculative_config=speculation, **settings
    )
    drafts = speculation is not None and speculation.method == "draft_model"
    directories = ModelDirectories(directory, directory if drafts else None, head)
    return ReplicaExecutor(config, directories, memory_plan(config, directories.configs(), 2**33))


@pytest.fixture
def models(tiny_model_dir, started):
    speculation = SpeculativeConfig.of("draft_model", 3, quantization="int8")
    return models_of(tiny_model_dir, speculation, quantization="int8", transport="tcp")


def test_both_are_started_as_configured(models, started, tiny_model_dir):
    models.load(PLACEMENT)
    target, draft = started.target[0].spec, started.draft[0].spec
    assert (target.name, draft.name) == ("target", "draft model")
    assert (target.bundles, draft.bundles) == ((1,), (2,))
    assert target.model == draft.model == ModelSource(str(tiny_model_dir), tiny_model_dir)
    assert (target.quantization, draft.quantization) == ("int8", "int8")
    assert (target.transport, draft.transport) == ("tcp", "tcp")
    assert (target.step_timeout_s, draft.step_timeout_s) == (60.0, 10.0), "streams wait for drafts"
    assert target.memory_settings == "gpu_memory_utilization (0.9) or max_num_seqs (64)"
    assert models.target is started.target[0]
    assert list(models.profiled) == ["target", "draft model"]
    assert models.counts == Counts()
    models.close()
    assert started.target[0].is_closed
    assert started.draft[0].is_closed


def test_a_head_is_loaded_by_the_ranks_of_the_target(tiny_model_dir, tmp_path, started):
    head = fitted_medusa_dir(tiny_model_dir, tmp_path, [list(range(3, 30))])
    keys = {"quantization": "int8", "speculative_token_map": "./tokens.json"}
    speculation = SpeculativeConfig.of("medusa", model=str(head), **keys)
    models = models_of(tiny_model_dir, speculation, head)
    models.load(PLACEMENT)
    assert started.draft == []
    source = ModelSource(str(head), head, may_be_pickled=True)
    assert started.target[0].spec.head == HeadSpec(source, "int8", None, "./tokens.json", "medusa")
    assert isinstance(models.speculation.make_proposer(), TargetHeadProposer)
    assert models.can_draft
    models.close()


def test_it_knows_where_the_ranks_of_a_node_run(models, started):
    assert models.places_on("here") == [], "before the start"
    models.load(PLACEMENT)
    assert models.places_on("here") == [RankPlace("here", "a", 7, None)] * 2
    assert models.places_on("elsewhere") == []
    models.mark_target_lost()
    assert models.places_on("here") == [RankPlace("here", "a", 7, None)]


def test_they_start_at_the_same_time(models, started, monkeypatch):
    """Neither is made before the other one is being made."""
    both = threading.Barrier(2, timeout=10)

    def make_target(*args):
        both.wait()
        return started.make_target(*args)

    def make_draft(*args):
        both.wait()
        return started.make_draft(*args)

    monkeypatch.setattr("cluster.workers.groups.target_group.TargetGroup", make_target)
    monkeypatch.setattr("cluster.workers.groups.target_group.AdapterGroup", make_draft)
    models.load(PLACEMENT)
    assert (len(started.target), len(started.draft)) == (1, 1)
    models.close()


def test_a_draft_model_beside_a_target_that_does_not_start_is_ended(models, started):
    started.target_error = TargetFailedError("no memory")
    with pytest.raises(TargetFailedError, match="no memory"):
        models.load(PLACEMENT)
    models.close()
    assert started.draft[0].is_closed


async def test_a_target_that_died_between_steps_is_reported_to_the_loop(models, started):
    models.load(PLACEMENT)
    loop = Loop()
    await models.check(loop)
    assert loop.lost == []
    error = started.target[0].error = TargetFailedError("rank 0 died")
    await models.check(loop)
    assert loop.lost == [error]
    assert models.restart_target() is models.target is started.target[1]
    assert started.target[0].is_killed
    assert models.counts.num_target_restarts == 1
    models.close()


async def test_a_service_keeps_spares_for_its_draft_model(models, started):
    models.load(PLACEMENT)
    assert started.spares == [], "not while the models load"
    await models.check(Loop())
    assert started.has_spare.wait(10)
    [draft] = started.draft
    assert started.spares == [(DraftWorker, draft.spec, draft.ranks.places)]
    models.close()


@pytest.mark.parametrize("is_llm", [True, False])
async def test_no_spares_are_kept_for_an_llm_or_where_they_are_turned_off(
    tiny_model_dir, started, monkeypatch, is_llm
):
    monkeypatch.setattr(RayExecutor, "_reserve", lambda self: PLACEMENT)
    settings = {
        "model": str(tiny_model_dir),
        "max_model_len": 128,
        "speculative_config": SpeculativeConfig.of("draft_model", 3),
    }
    if is_llm:
        config, make = LLMConfig(**settings), RayExecutor
    else:
        config, make = ServeConfig(**settings, spare_draft_worker=False), ReplicaExecutor
    directories = ModelDirectories(tiny_model_dir, tiny_model_dir, None)
    plan = memory_plan(config, directories.configs(), 2**33)
    models = make(config, directories, plan)
    if not is_llm:
        models.load(PLACEMENT)
    await models.check(Loop())
    assert not started.has_spare.wait(0.1)
    models.close()


@pytest.mark.parametrize("fallback", [None, "ngram"])
async def test_without_its_draft_model_a_replica_drafts_by_lookup_or_not_at_all(
    tiny_model_dir, started, monkeypatch, fallback
):
    speculation = SpeculativeConfig.of("draft_model", 3, quantization="int8", fallback=fallback)
    models = models_of(tiny_model_dir, speculation)
    models.load(PLACEMENT)
    assert (models.is_draft_up, models.can_draft) == (True, True)
    monkeypatch.setattr(
        "cluster.workers.groups.supervisors.DraftSupervisor.restart", lambda self: None
    )
    started.draft[0].error = DraftFailedError("it died")
    await models.check(Loop())
    assert started.draft[0].is_killed
    assert (models.is_draft_up, models.can_draft) == (False, fallback is not None)
    models.close()


@pytest.mark.parametrize(
    ("speculation", "drafts"), [(None, False), (SpeculativeConfig.of("ngram"), True)]
)
def test_a_replica_without_a_draft_model(tiny_model_dir, started, speculation, drafts):
    models = models_of(tiny_model_dir, speculation)
    models.load(PLACEMENT)
    assert started.draft == []
    assert (models.speculation.make_proposer() is not None) is drafts
    assert models.is_draft_up is None
    assert list(models.profiled) == ["target"]
    models.close()


def test_counts_before_the_start_are_zero(models):
    assert models.counts == Counts()
    assert models.is_draft_up is None
    with pytest.raises(AssertionError, match="not been started"):
        models.restart_target()


@pytest.mark.parametrize("mode", ["continuing", "outcomes", "auto"])
def test_a_draft_model_with_another_tokenizer_drafts_nothing_ahead(
    tiny_model_dir, started, tmp_path, mode
):
    """A kind of drafts ahead that was chosen is refused with the reason; auto drafts without."""
    speculation = SpeculativeConfig.of("draft_model", 3, async_drafting=mode)
    models = models_of(tiny_model_dir, speculation)
    shuffled = shuffled_llama_dir(tiny_model_dir, tmp_path)
    models._directories = ModelDirectories(tiny_model_dir, shuffled, None)
    if mode == "auto":
        models.load(PLACEMENT)
        assert models._plan.engine.speculation.ahead_choices == (DraftAhead.OFF,)
        assert len(started.draft) == 1
    else:
        with pytest.raises(InvalidValueError, match=r"async_drafting.*tokenizer is not the target"):
            models.load(PLACEMENT)
        assert started.draft == []
    models.close()


class OneSeat:
    """A shared draft worker with a seat of fewer blocks than the plan has."""

    def num_blocks(self, timeout_s):
        return 40

    def take(self, request, timeout_s):
        return Seat(Endpoint("ipc:///seat"), 40, "w", 0)


def test_a_replica_with_a_seat_starts_no_draft_ranks(tiny_model_dir, started, monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    connected = []

    def connect(role, spec, placement, ranks):
        assert placement is None
        connected.append((spec.limits.num_blocks, ranks.are_shared))
        return SimpleNamespace(ranks=ranks, patience=None, close=lambda: None)

    monkeypatch.setattr("cluster.workers.shared_draft.pool_supervisor.WorkerGroup", connect)
    models = models_of(tiny_model_dir, SpeculativeConfig.of("draft_model", 3))
    models._seats = OneSeat()
    models.load(PLACEMENT)
    assert connected == [(40, True)]
    assert started.draft == []
    assert models._plan.draft.num_blocks == 40
    models.close()


@pytest.mark.parametrize(
    ("executor_class", "module"),
    [
        (LocalExecutor, "specdec.llm.local_executor"),
        (ReplicaExecutor, "cluster.replica.ray_executor"),
    ],
)
def test_executors_pass_the_text_of_the_draft_model(tmp_path, monkeypatch, executor_class, module):
    monkeypatch.setattr(f"{module}.draft_profile_text", lambda directory: (directory, "text"))
    monkeypatch.setattr(LocalExecutor, "_load_target", lambda self: None)
    directories = ModelDirectories(target=tmp_path, draft=tmp_path / "draft")
    plan = SimpleNamespace(engine=None, draft=None)
    executor = executor_class(ServeConfig(model="tiny"), directories, plan)
    profiled = []
    monkeypatch.setattr(
        "specdec.engine.executor.make_policy",
        lambda _, config, models, *more: profiled.append(models),
    )
    executor.speculation.make_policy(None, None, None, (1, 2))
    [models] = profiled
    assert (models.text, models.draft_text) == ((1, 2), (tmp_path / "draft", "text"))
