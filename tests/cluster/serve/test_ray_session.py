"""Joining and leaving an existing Ray cluster, with a fake Ray and Serve."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from cluster.config.serve_config import ServeConfig
from cluster.control.peers import ROUTER
from cluster.serve import ray_session
from cluster.serve.deployment import GRPC_SERVICER_FUNCTIONS
from cluster.serve.ray_session import Listening, RaySession, StartupError

CONFIG = ServeConfig(model="tiny", device="cpu", ingress="serve", ray_address="head:6379")
OURS = list(GRPC_SERVICER_FUNCTIONS)


class PlayedServe:
    """Applications whose Routers drain until they are aborted, or indefinitely."""

    def __init__(self, *names, is_stuck=False):
        self.left, self.is_stuck = list(names), is_stuck
        self.deleted, self.drained = [], []
        self.num_shutdowns = 0
        self.draining, self.broken_off = threading.Event(), threading.Event()

    def status(self):
        router = SimpleNamespace(replica_states={"RUNNING": 1})
        each = SimpleNamespace(deployments={ROUTER: router})
        return SimpleNamespace(applications=dict.fromkeys(self.left, each))

    def get_deployment_handle(self, deployment, application):
        return SimpleNamespace(broadcast=self._broadcast)

    def _broadcast(self, method, timeout_s):
        assert method == "drain"
        self.drained.append(timeout_s)
        if timeout_s == 0:
            self.broken_off.set()
        return SimpleNamespace(results=self._await_drained)

    def _await_drained(self, timeout_s):
        self.draining.set()
        assert self.broken_off.wait(10)

    def delete(self, name, _blocking):
        assert not _blocking, "a blocking one waits a minute for each"
        self.deleted.append(name)
        if not self.is_stuck:
            self.left.remove(name)

    def shutdown(self):
        self.num_shutdowns += 1


@pytest.fixture
def play(monkeypatch):
    def play(*names, **options):
        played = PlayedServe(*names, **options)
        for name in ("status", "get_deployment_handle", "delete", "shutdown"):
            monkeypatch.setattr(serve, name, getattr(played, name))
        return played

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_session, "stop_ray", lambda started: None)
    monkeypatch.setattr(ray_session, "_POLL_S", 0.01)
    return play


def test_what_was_joined_is_left_without_what_was_brought(play):
    played = play("a", "b", "theirs")
    played.broken_off.set()  # nothing runs
    RaySession(CONFIG).stop(["a", "b"], 5, threading.Event())
    assert (played.left, played.deleted) == (["theirs"], ["a", "b"])
    assert played.drained == [5, 5]
    assert played.num_shutdowns == 0, "theirs needs it"


def test_a_second_signal_aborts_running_requests(play):
    played, hurry = play("a", "b"), threading.Event()
    stopping = threading.Thread(target=RaySession(CONFIG).stop, args=(["a", "b"], 60, hurry))
    stopping.start()
    assert played.draining.wait(10)
    assert played.deleted == []
    hurry.set()
    stopping.join(5)
    assert not stopping.is_alive()
    assert played.drained == [60, 60, 0.0, 0.0]
    assert played.left == []
    assert played.num_shutdowns == 1, "it was started with the first application"


def test_all_applications_are_deleted_where_some_hang(play, monkeypatch, caplog):
    """The log lists those that remain."""
    played = play("a", "b", is_stuck=True)
    played.broken_off.set()
    monkeypatch.setattr(ray_session, "_STOP_TIMEOUT_S", 0.05)
    RaySession(CONFIG).stop(["a", "b"], 0.1, threading.Event())
    assert set(played.deleted) == {"a", "b"}
    assert "not gone after 0.05 s: a, b" in caplog.text


@pytest.fixture
def join(monkeypatch):
    """Joins a cluster whose Serve was started with these options."""

    def join(config, functions=OURS, host="127.0.0.1", http_port=8000, grpc_port=9000):
        http = HTTPOptions(host=host, port=http_port)
        grpc = gRPCOptions(port=grpc_port, grpc_servicer_functions=functions)
        controller = SimpleNamespace(
            get_http_config=SimpleNamespace(remote=lambda: http),
            get_grpc_config=SimpleNamespace(remote=lambda: grpc),
        )
        monkeypatch.setattr(ray, "get_actor", lambda name, namespace: controller)
        session = RaySession(config)
        session.start()
        return session.listening

    monkeypatch.setattr(ray_session, "prepare_environment", lambda: None)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "get", list)
    monkeypatch.setattr(serve, "start", lambda **_: pytest.fail("Serve runs already"))
    return join


def test_calls_go_where_the_serve_that_runs_listens(join):
    there = Listening("10.0.0.1", 9100, 8100)
    assert join(CONFIG, host="10.0.0.1", http_port=8100, grpc_port=9100) == there
    given = replace(CONFIG, http_port=8100)
    assert join(given, http_port=8100) == Listening("127.0.0.1", 9000, 8100)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"http_port": 8001}, "http_port is 8001, but Serve runs there already, with 8000"),
        ({"grpc_port": 9001}, "grpc_port is 9001, but Serve runs there already, with 9000"),
        ({"host": "10.0.0.1"}, r"host is 10\.0\.0\.1, but Serve runs .* with 127\.0\.0\.1"),
    ],
)
def test_settings_that_differ_from_the_existing_serve_are_refused(join, given, message):
    with pytest.raises(StartupError, match=message):
        join(replace(CONFIG, **given))


@pytest.mark.parametrize("functions", [[], OURS[1:], OURS[::-1]])
def test_a_serve_without_our_services_is_refused(join, functions):
    with pytest.raises(StartupError, match=r"cluster\.api\.grpc\.serve_proxy\.restate_answers"):
        join(CONFIG, functions=functions)


def test_a_serve_may_have_services_of_others_too(join):
    functions = ["theirs.add_one", *OURS[:2], "theirs.add_two", *OURS[2:]]
    assert join(CONFIG, functions=functions) == Listening("127.0.0.1", 9000, 8000)
