# Modules: specdec.types.adapters, specdec.types.ranks
"""Adapters of an engine by name and state, and their places in a batch; without a model."""

import pytest

from specdec.engine.loaded.adapters import MAX_COUNTED_NAMES, OTHER_ADAPTERS, Adapters
from specdec.types.adapters import AdapterOrder, AdapterSource, AdapterState, LoRARequest
from specdec.types.errors import InvalidValueError, UnknownModelError
from specdec.types.messages import BASE_MODEL
from specdec.types.ranks import AdapterTarget
from specdec.types.reports.stats import Counts, SpeculationStats


class Ranks:
    """A target's ranks: what they hold, and their answer to the next load."""

    def __init__(self):
        self.fault = ""
        self.held = set()
        self.num_loads = 0
        self._loading = None

    def begin(self, step):
        raise AssertionError

    def collect(self):
        raise AssertionError

    def begin_adapter_load(self, adapter):
        assert self._loading is None, "two loads at a time"
        assert adapter.adapter_id not in self.held
        self._loading, self.num_loads = adapter.adapter_id, self.num_loads + 1

    def collect_adapter_load(self):
        if self.fault is None:
            return None
        if not self.fault:
            self.held.add(self._loading)
        self._loading = None
        return self.fault

    def unload_adapter(self, adapter_id):
        self.held.discard(adapter_id)


@pytest.fixture
def ranks():
    ranks = Ranks()
    assert isinstance(ranks, AdapterTarget)
    return ranks


@pytest.fixture
def adapters():
    return Adapters(max_loaded=3)


def load(adapters, name, **options):
    source = AdapterSource(f"org/{name}", f"/{name}")
    return adapters.load(name, source, 4, **{"replaces": False, **options})


def states(adapters, used=()):
    return {each.name: each.state for each in adapters.snapshot(used)}


def test_an_adapter_is_named_when_all_ranks_have_it(adapters, ranks):
    ranks.fault = None
    adapter_id = load(adapters, "a")
    assert adapters.advance(ranks, ()) == []
    assert (dict(adapters.ids), adapters.fault_of(adapter_id)) == ({}, None)
    assert states(adapters) == {"a": AdapterState.LOADING}
    assert adapters.is_loading
    assert not adapters.is_ready(adapter_id)
    ranks.fault = ""
    adapters.advance(ranks, ())
    assert (dict(adapters.ids), adapters.fault_of(adapter_id)) == ({"a": adapter_id}, "")
    assert states(adapters) == {"a": AdapterState.READY}
    assert adapters.is_settled
    assert ranks.num_loads == 1


def test_loads_follow_each_other(adapters, ranks):
    ids = [load(adapters, name) for name in "abc"]
    adapters.advance(ranks, ())
    assert ranks.held == set(ids)
    assert list(adapters.ids) == ["a", "b", "c"]


def test_an_unloaded_adapter_is_freed_with_its_last_request(adapters, ranks):
    adapter_id = load(adapters, "a")
    adapters.advance(ranks, ())
    adapters.use(adapter_id, "a")
    adapters.unload("a")
    with pytest.raises(UnknownModelError):
        adapters.use(adapter_id, "a")
    with pytest.raises(UnknownModelError):
        adapters.unload("a")
    adapters.advance(ranks, [adapter_id])
    assert ranks.held == {adapter_id}
    assert adapters.is_ready(adapter_id), "its running requests go on"
    adapters.advance(ranks, [BASE_MODEL])
    assert ranks.held == set()
    assert states(adapters) == {}


def test_an_id_is_never_used_again(adapters, ranks):
    seen = set()
    for _ in range(5):
        seen.add(load(adapters, "a"))
        adapters.advance(ranks, ())
        adapters.unload("a")
        adapters.advance(ranks, ())
    assert len(seen) == 5
    assert BASE_MODEL not in seen


def test_a_replaced_adapter_keeps_its_running_requests(adapters, ranks):
    first = load(adapters, "a")
    adapters.advance(ranks, ())
    second = load(adapters, "a", replaces=True)
    assert dict(adapters.ids) == {"a": first}, "until the new one is loaded"
    adapters.advance(ranks, [first])
    assert dict(adapters.ids) == {"a": second}
    assert ranks.held == {first, second}
    assert adapters.use(first, "a") == second, "a request that was encoded in the meantime"
    adapters.advance(ranks, [second])
    assert ranks.held == {second}


class Watched(Adapters):
    """Adapters with every mapping of names that another thread could have read."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "ids":
            self.__dict__.setdefault("seen", []).append(value)


def test_a_name_is_known_while_its_adapter_is_replaced(ranks):
    adapters = Watched(max_loaded=3)
    load(adapters, "a")
    adapters.advance(ranks, ())
    adapters.seen.clear()
    load(adapters, "a", replaces=True)
    adapters.advance(ranks, ())
    assert adapters.seen
    assert all("a" in ids for ids in adapters.seen)


def test_a_failed_load_is_reported_before_the_next_one_is_begun(adapters, ranks):
    """Otherwise the loss of the target in the next one would lose the failure."""
    first, second = load(adapters, "a"), load(adapters, "b")
    ranks.fault = "no such file"
    assert adapters.advance(ranks, ()) == [first]
    assert ranks.num_loads == 1
    ranks.fault = ""
    assert adapters.advance(ranks, ()) == []
    assert dict(adapters.ids) == {"b": second}


def test_orders_that_are_refused(adapters, ranks):
    load(adapters, "a")
    with pytest.raises(InvalidValueError, match="a name that no loaded adapter has"):
        load(adapters, "a")
    load(adapters, "b")
    load(adapters, "c")
    with pytest.raises(InvalidValueError, match=r"is 4; it must be at most 3 \(max_cpu_loras\)"):
        load(adapters, "d")
    with pytest.raises(InvalidValueError, match="at most 3"):
        load(adapters, "a", replaces=True)
    with pytest.raises(UnknownModelError, match="model 'x' is not served"):
        adapters.unload("x")


def test_a_load_that_fails_leaves_nothing(adapters, ranks):
    ranks.fault = "rank 1: no such file"
    adapter_id = load(adapters, "a")
    assert adapters.advance(ranks, ()) == [adapter_id]
    assert adapters.fault_of(adapter_id) == "rank 1: no such file"
    assert adapters.fault_of(adapter_id) == "", "reported once"
    assert states(adapters) == {}
    assert adapters.is_settled
    ranks.fault = ""
    load(adapters, "a")
    adapters.advance(ranks, ())
    assert list(adapters.ids) == ["a"]


def test_only_the_last_failures_wait_for_callers_that_may_have_left(adapters, ranks, monkeypatch):
    monkeypatch.setattr("specdec.engine.loaded.adapters._MAX_FAULTS", 2)
    ranks.fault = "no such file"
    ids = []
    for name in "abc":
        ids.append(load(adapters, name))
        adapters.advance(ranks, ())
    ranks.fault = ""
    ids.append(load(adapters, "d"))
    adapters.advance(ranks, ())
    found = [adapters.fault_of(each) for each in ids]
    assert found == ["its result is no longer known", "no such file", "no such file", ""]


class Drafter:
    """A draft model that has what it was ordered to load. fault: of all its loads."""

    def __init__(self):
        self.fault, self.ordered = "", set()

    def load_adapter(self, adapter):
        self.ordered.add(adapter.adapter_id)

    def adapter_fault(self, adapter_id):
        return self.fault

    def unload_adapter(self, adapter_id):
        self.ordered.discard(adapter_id)


def test_a_draft_model_that_loses_a_counterpart_does_not_end_the_load_of_the_target(ranks):
    """As when its worker restarts while the target loads, and the files are gone."""
    adapters = Adapters(max_loaded=3, drafter=Drafter())
    ranks.fault = None
    first = load(adapters, "a", draft=AdapterSource("org/draft", "/draft"))
    assert adapters.advance(ranks, ()) == []
    assert (ranks.num_loads, adapters.drafter.ordered) == (1, {first})
    for fault in ("no such file", None):
        adapters.drafter.fault = fault
        assert adapters.advance(ranks, ()) == []
    ranks.fault = ""
    second = load(adapters, "b")
    assert adapters.advance(ranks, ()) == []
    assert dict(adapters.ids) == {"a": first, "b": second}
    assert ranks.held == {first, second}


def test_a_counterpart_that_cannot_be_loaded_fails_the_load_before_the_target_begins(ranks):
    adapters = Adapters(max_loaded=3, drafter=Drafter())
    adapters.drafter.fault = "no such file"
    adapter_id = load(adapters, "a", draft=AdapterSource("org/draft", "/draft"))
    assert adapters.advance(ranks, ()) == [adapter_id]
    assert adapters.fault_of(adapter_id) == "draft model: no such file"
    assert (ranks.num_loads, adapters.drafter.ordered) == (0, set())


def test_a_restarted_target_loads_named_and_used_adapters(adapters, ranks):
    first, second, third = (load(adapters, name) for name in "abc")
    adapters.advance(ranks, ())
    adapters.unload("b")
    adapters.unload("c")
    adapters.restart()
    again = Ranks()
    assert adapters.is_loading
    assert list(adapters.ids) == ["a"], "requests for it wait"
    adapters.use(first, "a")
    adapters.advance(again, [second])
    assert again.held == {first, second}
    assert states(adapters, [second]) == {
        "a": AdapterState.READY,
        "b": AdapterState.UNLOADING,
    }
    assert not adapters.is_ready(third)
    adapters.advance(again, ())
    assert again.held == {first}


def test_an_adapter_that_a_restart_loses_has_no_name(adapters, ranks):
    adapter_id = load(adapters, "a")
    adapters.advance(ranks, ())
    adapters.restart()
    again = Ranks()
    again.fault = "gone"
    assert adapters.advance(again, [adapter_id]) == [adapter_id]
    assert dict(adapters.ids) == {}
    assert adapters.fault_of(adapter_id) == "", "no order waits for it"


def test_the_least_recently_used_idle_adapter_makes_room(adapters, ranks):
    ids = {name: load(adapters, name) for name in "abc"}
    adapters.advance(ranks, ())
    adapters.use(ids["a"], "a")
    held = adapters.hold("b")
    adapters.make_room([])
    adapters.advance(ranks, ())
    assert list(adapters.ids) == ["a", "b"], "b is held, a was used later than c"
    assert adapters.has_room
    load(adapters, "d")
    adapters.advance(ranks, ())
    adapters.make_room([ids["a"], adapters.ids["d"]])
    adapters.advance(ranks, [ids["a"]])
    assert not adapters.has_room, "all are held or used"
    adapters.let_go(held)
    adapters.make_room([ids["a"]])
    adapters.advance(ranks, [ids["a"]])
    assert list(adapters.ids) == ["a", "d"]


def test_a_held_adapter_stays_when_it_is_unloaded(adapters, ranks):
    adapter_id = load(adapters, "a")
    adapters.advance(ranks, ())
    adapters.hold("a")
    adapters.unload("a")
    adapters.advance(ranks, ())
    assert ranks.held == {adapter_id}
    adapters.let_go(adapter_id)
    adapters.advance(ranks, ())
    assert ranks.held == set()


def test_the_number_of_counted_names_is_bounded(ranks):
    adapters, counts = Adapters(max_loaded=1), Counts()
    for index in range(MAX_COUNTED_NAMES + 5):
        adapter_id = load(adapters, f"a{index}")
        adapters.advance(ranks, ())
        adapters.add_to(counts)
        if index <= MAX_COUNTED_NAMES:
            assert [*counts.tokens_by_adapter.values()][-1] == 0, "before its first token"
        adapters.record(adapter_id, 2, 3, 1)
        adapters.unload(f"a{index}")
        adapters.advance(ranks, ())
    adapters.add_to(counts)
    assert len(counts.tokens_by_adapter) == MAX_COUNTED_NAMES + 1
    assert counts.tokens_by_adapter[OTHER_ADAPTERS] == 10
    assert counts.drafts_by_adapter[OTHER_ADAPTERS] == SpeculationStats(5, 15, 5)
    assert counts.drafts_by_adapter["a0"] == SpeculationStats(1, 3, 1)


def test_adapters_that_are_not_used_take_no_names_from_others(ranks):
    adapters, counts = Adapters(max_loaded=MAX_COUNTED_NAMES + 2), Counts()
    ids = [load(adapters, f"a{index}") for index in range(MAX_COUNTED_NAMES + 2)]
    adapters.advance(ranks, ())
    for adapter_id in ids[2:]:
        adapters.record(adapter_id, 2, 3, 1)
    adapters.add_to(counts)
    assert counts.tokens_by_adapter == {
        OTHER_ADAPTERS: 0,
        **{f"a{index}": 2 for index in range(2, MAX_COUNTED_NAMES + 2)},
    }
    adapters._counted = type("Unsearchable", (dict,), {"items": None})(adapters._counted)
    adapters.record(ids[0], 2, 3, 1)
    assert adapters._counted[OTHER_ADAPTERS][0] == 2


def test_requests_and_orders_are_validated():
    for arguments, field in (
        (("", 1), "lora_name"),
        (("a b", 1), "lora_name"),
        (("a", 0), "lora_int_id"),
        (("a", 1, "x\n"), "lora_path"),
    ):
        with pytest.raises(InvalidValueError) as error:
            LoRARequest(*arguments)
        assert error.value.field == field
    assert LoRARequest("org/a:1", 3).lora_path == ""
    for changes in ({"path": "/a"}, {"name": "a", "replaces": True}, {"name": "a" * 257}):
        with pytest.raises(InvalidValueError):
            AdapterOrder(**changes)
