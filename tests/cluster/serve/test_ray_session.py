"""Joining and leaving an existing Ray cluster, with fakes of Ray and Serve."""

import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from cluster.api.serve_proxy.grpc import MAX_MESSAGE_VARIABLE
from cluster.api.serve_proxy.http import (
    CALLBACK,
    CALLBACK_VARIABLE,
    MAX_BODY_VARIABLE,
    MAX_INFLIGHT_VARIABLE,
)
from cluster.config.serve_config import ServeConfig
from cluster.control.peers import ROUTER
from cluster.serve import ray_session
from cluster.serve.application import GRPC_SERVICER_FUNCTIONS
from cluster.serve.ray_session import Listening, RaySession, StartupError

CONFIG = ServeConfig(model="tiny", device="cpu", ingress="serve", ray_address="head:6379")
OURS = list(GRPC_SERVICER_FUNCTIONS)


class FakeServe:
    """Applications whose Routers drain until they are aborted; stuck ones are never deleted."""

    def __init__(self, *names, is_stuck=False):
        self.left, self.is_stuck = list(names), is_stuck
        self.deleted, self.drained = [], []
        self.num_shutdowns = 0
        self.draining, self.aborted = threading.Event(), threading.Event()

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
            self.aborted.set()
        return SimpleNamespace(results=self._await_drained)

    def _await_drained(self, timeout_s):
        self.draining.set()
        assert self.aborted.wait(30)

    def delete(self, name, _blocking):
        assert not _blocking, "a blocking delete waits a minute for each application"
        self.deleted.append(name)
        if not self.is_stuck:
            self.left.remove(name)

    def shutdown(self):
        self.num_shutdowns += 1


@pytest.fixture
def fake_serve(monkeypatch):
    def fake_serve(*names, **options):
        fake = FakeServe(*names, **options)
        for name in ("status", "get_deployment_handle", "delete", "shutdown"):
            monkeypatch.setattr(serve, name, getattr(fake, name))
        return fake

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_session, "stop_ray", lambda started: None)
    monkeypatch.setattr(ray_session, "_POLL_S", 0.01)
    return fake_serve


def test_stop_deletes_our_applications_alone(fake_serve):
    fake = fake_serve("a", "b", "other")
    fake.aborted.set()  # nothing runs
    RaySession(CONFIG).stop(["a", "b"], 5, threading.Event())
    assert (fake.left, fake.deleted) == (["other"], ["a", "b"])
    assert fake.drained == [5, 5]
    assert fake.num_shutdowns == 0, "the other application needs Serve"


def test_a_second_signal_aborts_running_requests(fake_serve):
    fake, abort = fake_serve("a", "b"), threading.Event()
    stopping = threading.Thread(target=RaySession(CONFIG).stop, args=(["a", "b"], 60, abort))
    stopping.start()
    assert fake.draining.wait(30)
    assert fake.deleted == []
    abort.set()
    stopping.join(30)
    assert not stopping.is_alive()
    assert fake.drained == [60, 60, 0.0, 0.0]
    assert fake.left == []
    assert fake.num_shutdowns == 1, "Serve was started for the first application"


def test_an_own_ray_ends_before_the_guard_would_kill_it(fake_serve, monkeypatch):
    monkeypatch.setattr(ray_session, "_OWN_STOP_S", 1.0)
    monkeypatch.setattr(ray_session, "_LAST_CALL_S", 10.0)
    fake = fake_serve("a", is_stuck=True)
    fake.aborted.set()
    reports = Mock()
    RaySession(replace(CONFIG, ray_address=None), to_guard=reports).stop(
        ["a"], 0.1, threading.Event()
    )
    assert fake.deleted == ["a"]
    assert reports.mock_calls == [call.ending()]
    draining = [each for each in threading.enumerate() if "drain_and_delete" in each.name]
    assert draining == [], "its next call of Serve would start another Ray"


def test_stuck_applications_are_all_deleted_and_logged(fake_serve, monkeypatch, caplog):
    fake = fake_serve("a", "b", is_stuck=True)
    fake.aborted.set()
    monkeypatch.setattr(ray_session, "_STOP_TIMEOUT_S", 0.05)
    RaySession(CONFIG).stop(["a", "b"], 0.1, threading.Event())
    assert set(fake.deleted) == {"a", "b"}
    assert "not gone after 0.05 s: a, b" in caplog.text


@pytest.fixture
def join(monkeypatch):
    """Return a function that joins a cluster whose Serve was started with these options."""

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


def test_the_addresses_are_those_of_the_running_serve(join):
    expected = Listening("10.0.0.1", 9100, 8100)
    assert join(CONFIG, host="10.0.0.1", http_port=8100, grpc_port=9100) == expected
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
def test_a_conflict_with_the_running_serve_is_an_error(join, given, message):
    with pytest.raises(StartupError, match=message):
        join(replace(CONFIG, **given))


@pytest.mark.parametrize("functions", [[], OURS[1:], OURS[::-1]])
def test_a_serve_without_our_services_is_an_error(join, functions):
    with pytest.raises(StartupError, match=r"cluster\.api\.serve_proxy\.grpc\.restate_answers"):
        join(CONFIG, functions=functions)


def test_a_serve_may_have_other_services(join):
    functions = ["theirs.add_one", *OURS[:2], "theirs.add_two", *OURS[2:]]
    assert join(CONFIG, functions=functions) == Listening("127.0.0.1", 9000, 8000)


def test_the_proxies_of_a_private_ray_inherit_the_limits(monkeypatch):
    for name in (CALLBACK_VARIABLE, MAX_BODY_VARIABLE, MAX_INFLIGHT_VARIABLE, MAX_MESSAGE_VARIABLE):
        monkeypatch.setenv(name, "0")  # restored at the end
        monkeypatch.delenv(name)
    seen = []

    def start_ray():
        seen.append(dict(os.environ))
        return SimpleNamespace(vital_processes=dict)

    monkeypatch.setattr(ray_session, "start_ray", start_ray)
    monkeypatch.setattr(RaySession, "_start_serve", lambda session: None)
    config = ServeConfig(device="cpu", ingress="serve", grpc_max_message_mib=4, max_inflight_mib=64)
    RaySession(config, [replace(config, http_max_body_mib=32)]).start()
    [environment] = seen
    assert environment[CALLBACK_VARIABLE] == CALLBACK
    assert environment[MAX_BODY_VARIABLE] == "32"
    assert environment[MAX_INFLIGHT_VARIABLE] == "64"
    assert environment[MAX_MESSAGE_VARIABLE] == str(4 * 2**20)
