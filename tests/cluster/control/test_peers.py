"""Who serves which model, and who is asked how often."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from cluster.control import peers
from cluster.control.peers import (
    CONTROL_PLANE,
    ROUTER,
    Applications,
    Fellow,
    ServeDirectory,
    ServiceCard,
)
from specdec.types.errors import NotReadyError, UnknownModelError


class Handle:
    """Of a deployment whose methods stream what they are given, as Serve's handles do."""

    def __init__(self, answers=(), has_replicas=True):
        self.answers, self.has_replicas = answers, has_replicas
        self.num_cancelled = 0

    def options(self, stream):
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


def fellow(model, handle=None):
    return Fellow(ServiceCard(model, 1), handle or Handle(), control_plane=None)


class Surroundings:
    """What can be found, and how often somebody has looked."""

    def __init__(self, *models):
        self.models = models
        self.num_looks = 0

    async def look(self):
        self.num_looks += 1
        await asyncio.sleep(0)
        return {f"app-{model}": fellow(model) for model in self.models}


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch):
    monkeypatch.setattr(peers, "_FRESH_S", 0.0)


async def test_nobody_looks_for_our_own_model():
    around = Surroundings("b")
    mine = Applications("a", around.look)
    assert await mine.elsewhere("a") is None
    assert await mine.elsewhere("") is None
    assert around.num_looks == 0


async def test_a_model_is_looked_for_once():
    around = Surroundings("b")
    mine = Applications("a", around.look)
    for _ in range(3):
        assert (await mine.elsewhere("b")).card.model == "b"
    assert around.num_looks == 1


async def test_an_application_that_comes_later_is_found_and_one_that_goes_forgotten():
    around = Surroundings("b")
    mine = Applications("a", around.look)
    await mine.elsewhere("b")
    around.models = ("c",)
    assert (await mine.elsewhere("c")).card.model == "c"
    with pytest.raises(UnknownModelError, match="served: 'a', 'c'"):
        await mine.elsewhere("b")


async def test_a_model_that_has_gone_is_not_waited_for(monkeypatch):
    around = Surroundings("b")
    mine = Applications("a", around.look)
    await mine.elsewhere("b")
    around.models = ()
    assert (await mine.elsewhere("b")).card.model == "b"
    monkeypatch.setattr(peers, "_STALE_S", -1.0)
    with pytest.raises(UnknownModelError):
        await mine.elsewhere("b")


async def test_unknown_names_cannot_make_it_look_all_the_time(monkeypatch):
    monkeypatch.setattr(peers, "_FRESH_S", 3600.0)
    around = Surroundings("b")
    mine = Applications("a", around.look)
    asked = (mine.elsewhere(f"x{i}") for i in range(20))
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(error, UnknownModelError) for error in errors)
    assert around.num_looks == 1


async def test_alone_the_name_that_there_is_is_told():
    with pytest.raises(UnknownModelError, match="served: 'a'"):
        await Applications("a").elsewhere("b")


async def test_fellows_come_in_the_order_of_their_names():
    fellows = await Applications("m", Surroundings("z", "b").look).fellows()
    assert [each.card.model for each in fellows] == ["b", "z"]


async def test_what_is_streamed_is_cancelled_where_it_is_left():
    handle = Handle(answers=range(100))
    stream = fellow("b", handle).stream("answer")
    assert await anext(stream) == 0
    assert handle.num_cancelled == 0
    await stream.aclose()
    assert handle.num_cancelled == 1


async def test_without_replicas_it_says_so_at_once(monkeypatch):
    monkeypatch.setattr(peers, "_ANSWER_TIMEOUT_S", 0.1)
    with pytest.raises(NotReadyError, match="the model b is starting or stopping"):
        await anext(fellow("b", Handle(has_replicas=False)).stream("answer"))


class PlayedServe:
    """Serve with applications whose ControlPlanes answer, are away, or were never there."""

    def __init__(self, **models):
        """models: what the ControlPlane of each application says that it serves; None: nothing."""
        self.models = models
        self.away = set()
        self.num_asked = 0

    def status(self):
        each = SimpleNamespace(deployments=(ROUTER, CONTROL_PLANE))
        theirs = SimpleNamespace(deployments=("Theirs",))
        return SimpleNamespace(applications={"theirs": theirs} | dict.fromkeys(self.models, each))

    def get_deployment_handle(self, deployment, application):
        card = SimpleNamespace(remote=lambda: self._card(application))
        return SimpleNamespace(card=card, _init=lambda: None)

    async def _card(self, application):
        self.num_asked += 1
        if application in self.away:
            raise RayError("the actor died")
        if self.models[application] is None:
            await asyncio.Event().wait()
        return ServiceCard(self.models[application], 1)


@pytest.fixture
def played(monkeypatch):
    played = PlayedServe(own="a", app="b")
    monkeypatch.setattr(peers, "serve", played)
    monkeypatch.setattr(peers, "_ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(peers, "_STALE_S", -1.0)
    return played


async def test_a_model_is_there_while_its_control_plane_is_away(played):
    """Until Serve lists its application no longer."""
    mine = Applications("a", ServeDirectory("own").look)
    await mine.elsewhere("b")
    played.away.add("app")
    assert (await mine.elsewhere("b")).card.model == "b"
    del played.models["app"]
    with pytest.raises(UnknownModelError):
        await mine.elsewhere("b")


async def test_an_application_that_serves_another_model_is_known_by_it(played):
    directory = ServeDirectory("own")
    await directory.look()
    played.models["app"] = "c"
    await directory.look()
    await asyncio.sleep(0)
    assert [each.card.model for each in (await directory.look()).values()] == ["c"]


async def test_who_says_nothing_is_waited_for_once(played):
    played.models["silent"] = None
    directory = ServeDirectory("own")
    assert list(await directory.look()) == ["app"]
    async with asyncio.timeout(0.04):
        assert list(await directory.look()) == ["app"]
        assert list(await directory.look()) == ["app"]
    assert played.num_asked == 4, "the silent one was asked once, the other each time"
    asking = directory._listed["silent"]._asking
    del played.models["silent"]
    await directory.look()
    await asyncio.sleep(0)
    assert asking.cancelled()
