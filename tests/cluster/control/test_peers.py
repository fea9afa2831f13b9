"""The directory of peer applications, and how often it is refreshed."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayError

from cluster.control import peers
from cluster.control.peers import (
    CONTROL_PLANE,
    ROUTER,
    Applications,
    PeerApplication,
    ServeDirectory,
    ServiceCard,
)
from specdec.types.errors import NotReadyError, UnknownModelError
from tests.clock import Clock


class Handle:
    """Handle of a deployment whose methods stream `answers`, as Serve's handles do."""

    def __init__(self, answers=(), has_replicas=True, adapters=()):
        self.answers, self.has_replicas, self.adapters = answers, has_replicas, adapters
        self.num_cancelled = self.num_asked = 0

    @property
    def own_model_infos(self):
        async def remote():
            self.num_asked += 1
            return tuple(SimpleNamespace(model=each, parent="b") for each in self.adapters)

        return SimpleNamespace(remote=remote)

    def options(self, stream, session_id):
        assert stream
        return self

    def running_replicas_populated(self):
        return self.has_replicas

    @property
    def answer(self):
        return self

    def remote(self):
        return self

    def cancel(self):
        self.num_cancelled += 1

    async def __aiter__(self):
        for each in self.answers:
            await asyncio.sleep(0)
            yield each


def peer(model, handle=None):
    return PeerApplication(ServiceCard(model, 1), handle or Handle(), control_plane=None)


class Environment:
    """Applications that can be found, with a count of the lookups."""

    def __init__(self, *models):
        self.models = models
        self.num_lookups = 0

    async def list_peers(self):
        self.num_lookups += 1
        await asyncio.sleep(0)
        return {f"app-{model}": peer(model) for model in self.models}


@pytest.fixture
def clock():
    return Clock()


async def test_the_own_model_is_not_looked_up():
    environment = Environment("b")
    applications = Applications("a", environment.list_peers)
    assert await applications.find("a") is None
    assert await applications.find("") is None
    assert environment.num_lookups == 0


async def test_the_default_model_is_the_own_one_unless_a_peer_has_this_name():
    applications = Applications("a", Environment("b").list_peers)
    assert await applications.find("default") is None
    applications.require_own("default")
    with pytest.raises(UnknownModelError, match="served: 'a', 'b'"):
        applications.require_own("b")
    applications = Applications("a", Environment("default").list_peers)
    assert (await applications.find("default")).card.model == "default"


async def test_a_model_is_looked_up_once():
    environment = Environment("b")
    applications = Applications("a", environment.list_peers)
    for _ in range(3):
        assert (await applications.find("b")).card.model == "b"
    assert environment.num_lookups == 1


async def test_a_later_application_is_found_and_a_deleted_one_forgotten(clock):
    environment = Environment("b")
    applications = Applications("a", environment.list_peers, clock=clock)
    await applications.find("b")
    environment.models = ("c",)
    clock.now_s += 1
    assert (await applications.find("c")).card.model == "c"
    clock.now_s += 1
    with pytest.raises(NotReadyError, match="b is being redeployed"):
        await applications.find("b")
    clock.now_s += 120
    with pytest.raises(UnknownModelError, match="served: 'a', 'c'"):
        await applications.find("b")


async def test_an_application_is_expected_back_for_two_minutes(clock):
    environment = Environment("b")
    applications = Applications("a", environment.list_peers, clock=clock)
    applications.expect_application("app-b")  # unknown so far
    await applications.peers()
    environment.models = ()
    clock.now_s += 119
    await applications.peers()
    with pytest.raises(NotReadyError, match="app-b is being redeployed"):
        applications.expect_application("app-b")
    clock.now_s += 2
    applications.expect_application("app-b")


async def test_a_failing_lookup_leaves_the_last_list(clock):
    environment = Environment("b")
    applications = Applications("a", environment.list_peers, clock=clock)
    await applications.find("b")
    applications._list_peers = lambda: 1 / 0
    clock.now_s += 6
    assert (await applications.find("b")).card.model == "b"


async def test_a_stale_entry_is_looked_up_again(clock):
    environment = Environment("b")
    applications = Applications("a", environment.list_peers, clock=clock)
    await applications.find("b")
    environment.models = ()
    clock.now_s += 4.9
    assert (await applications.find("b")).card.model == "b"
    clock.now_s += 0.2
    with pytest.raises(NotReadyError):
        await applications.find("b")


async def test_lookups_of_unknown_names_are_limited(clock):
    environment = Environment("b")
    applications = Applications("a", environment.list_peers, clock=clock)
    asked = (applications.find(f"x{i}") for i in range(20))
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(error, UnknownModelError) for error in errors)
    assert environment.num_lookups == 1


async def test_adapters_of_a_peer_are_found_and_forgotten(clock):
    handle = Handle(adapters=("sql", "chat"))

    async def list_peers():
        return {"app-b": peer("b", handle)}

    applications = Applications("a", list_peers, lambda: ("mine",), clock)
    assert applications.is_own("mine")
    assert await applications.find("mine") is None
    for _ in range(3):
        assert (await applications.find("sql")).card.model == "b"
    assert handle.num_asked == 1
    handle.adapters = ("chat",)
    clock.now_s += 5.1
    with pytest.raises(UnknownModelError, match="served: 'a', 'mine', 'b', 'chat'"):
        await applications.find("sql")


async def test_questions_for_adapters_are_limited(clock):
    handle = Handle()

    async def list_peers():
        return {"app-b": peer("b", handle)}

    applications = Applications("a", list_peers, clock=clock)
    asked = (applications.find(f"x{i}") for i in range(20))
    await asyncio.gather(*asked, return_exceptions=True)
    assert handle.num_asked == 1


async def test_without_peers_the_error_names_the_own_model():
    with pytest.raises(UnknownModelError, match="served: 'a'"):
        await Applications("a").find("b")


async def test_peers_are_ordered_by_model():
    found = await Applications("m", Environment("z", "b").list_peers).peers()
    assert [each.card.model for each in found] == ["b", "z"]


async def test_closing_a_stream_cancels_the_call():
    handle = Handle(answers=range(100))
    stream = peer("b", handle).stream("answer")
    assert await anext(stream) == 0
    assert handle.num_cancelled == 0
    await stream.aclose()
    assert handle.num_cancelled == 1


async def test_a_stream_without_replicas_raises_not_ready(monkeypatch):
    monkeypatch.setattr(peers, "_ANSWER_TIMEOUT_S", 0.1)
    with pytest.raises(NotReadyError, match="the model b is starting or stopping"):
        await anext(peer("b", Handle(has_replicas=False)).stream("answer"))


class FakeHandle:
    is_initialized = False

    def __init__(self, serve, application):
        self.card = SimpleNamespace(remote=lambda: serve._card(application))

    def _init(self):
        assert not self.is_initialized
        self.is_initialized = True


class FakeServe:
    """Serve with applications whose ControlPlanes answer, fail, or never answer."""

    def __init__(self, **models):
        """models: the model that each ControlPlane reports; None: it never answers."""
        self.models = models
        self.unavailable = set()
        self.handles = {}
        self.num_calls = 0

    def status(self):
        each = SimpleNamespace(deployments=(ROUTER, CONTROL_PLANE))
        theirs = SimpleNamespace(deployments=("Theirs",))
        return SimpleNamespace(applications={"theirs": theirs} | dict.fromkeys(self.models, each))

    def get_deployment_handle(self, deployment, application):
        """Return the same handle for the same names, which can be initialized once, as Serve."""
        return self.handles.setdefault((deployment, application), FakeHandle(self, application))

    async def _card(self, application):
        self.num_calls += 1
        if application in self.unavailable:
            raise RayError("the actor died")
        if self.models[application] is None:
            await asyncio.Event().wait()
        return ServiceCard(self.models[application], 1)


@pytest.fixture
def fake_serve(monkeypatch):
    fake_serve = FakeServe(own="a", app="b")
    monkeypatch.setattr(ray, "serve", fake_serve)
    monkeypatch.setattr(peers, "_ANSWER_TIMEOUT_S", 0.05)
    return fake_serve


async def test_a_model_is_found_while_its_control_plane_is_unavailable(fake_serve, clock):
    """Until its application is deleted, and again after that was deployed again."""
    applications = Applications("a", ServeDirectory("own").list_peers, clock=clock)
    await applications.find("b")
    fake_serve.unavailable.add("app")
    clock.now_s += 5.1
    assert (await applications.find("b")).card.model == "b"
    del fake_serve.models["app"]
    clock.now_s += 5.1
    with pytest.raises(NotReadyError):
        await applications.find("b")
    fake_serve.models["app"] = "b"
    fake_serve.unavailable.clear()
    clock.now_s += 5.1
    assert (await applications.find("b")).card.model == "b"


async def test_a_changed_model_is_noticed(fake_serve):
    directory = ServeDirectory("own")
    await directory.list_peers()
    fake_serve.models["app"] = "c"
    await directory.list_peers()
    await asyncio.sleep(0)
    assert [each.card.model for each in (await directory.list_peers()).values()] == ["c"]


async def test_a_silent_application_delays_only_one_lookup(fake_serve, monkeypatch):
    fake_serve.models["silent"] = None
    directory = ServeDirectory("own")
    assert list(await directory.list_peers()) == ["app"]
    monkeypatch.setattr(peers, "_ANSWER_TIMEOUT_S", 3600)
    async with asyncio.timeout(30):  # ends the test if a lookup waits for the silent one
        assert list(await directory.list_peers()) == ["app"]
        assert list(await directory.list_peers()) == ["app"]
    assert fake_serve.num_calls == 4, "the silent one was asked once, the other each time"
    asking = directory._listed["silent"]._request
    del fake_serve.models["silent"]
    await directory.list_peers()
    await asyncio.sleep(0)
    assert asking.cancelled()
