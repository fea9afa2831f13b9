"""What `specdec serve` finds out before it starts anything, and says when it has."""

import socket
from types import SimpleNamespace

import pytest
from ray import serve

from cluster.config.serve_config import ServeConfig
from cluster.control.store import ControlStore, StoredSpeculation
from cluster.serve.ray_session import Listening, RaySession, StartupError
from cluster.serve.startup import Served, _how_to_call, deploy, running_service
from specdec.types.errors import InvalidValueError, ModelNotFoundError, OutOfMemoryError
from tests.e2e.conftest import free_ports
from tests.specdec.tiny import renamed_dtype_dir


@pytest.fixture
def lines():
    """What the service has reported."""
    return []


@pytest.fixture
def start(monkeypatch, tmp_path, lines):
    """Starts the service up to the point where Ray would be started."""
    monkeypatch.setattr(RaySession, "start", lambda session: pytest.fail("Ray started"))

    def start(**settings):
        grpc_port, http_port = free_ports(2)
        ports = {"grpc_port": grpc_port, "http_port": http_port}
        settings = {"state_dir": tmp_path / "state"} | ports | settings
        with running_service(ServeConfig(**settings), lines.append):
            pass

    return start


@pytest.mark.parametrize("setting", ["grpc_port", "http_port"])
def test_a_port_in_use(start, setting):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = f"cannot listen on 127.0.0.1:{port}: address already in use"
        with pytest.raises(StartupError, match=message):
            start(**{setting: port})


def test_a_host_that_is_not_ours(start):
    with pytest.raises(StartupError, match=r"cannot listen on 203\.0\.113\.7"):
        start(host="203.0.113.7")


def test_a_model_that_is_not_there(start):
    with pytest.raises(ModelNotFoundError):
        start(model="./no-such-model")


def test_more_ranks_than_the_machine_bears(start, tiny_model_dir):
    with pytest.raises(InvalidValueError, match="tensor_parallel_size is 900"):
        start(model=str(tiny_model_dir), tensor_parallel_size=900)


def test_more_memory_than_there_is(start, tiny_model_dir):
    with pytest.raises(OutOfMemoryError, match="GiB are free"):
        start(model=str(tiny_model_dir), kv_cache_memory_gib=100_000.0)


def test_a_checkpoint_of_no_dtype_that_a_model_runs_in(start, tiny_model_dir, tmp_path):
    model = renamed_dtype_dir(tiny_model_dir, tmp_path / "model", dtype="float64")
    with pytest.raises(InvalidValueError, match=r"dtype is 'auto'.* config.json has float64"):
        start(model=str(model), dtype="auto")


class RayWouldStartError(Exception):
    """All checks are passed."""


def test_what_an_operator_has_set_is_told(start, lines, monkeypatch, tiny_model_dir, tmp_path):
    def stop(session):
        raise RayWouldStartError

    monkeypatch.setattr(RaySession, "start", stop)
    served = {"model": str(tiny_model_dir), "served_model_name": "tiny"}
    with pytest.raises(RayWouldStartError):
        start(**served)
    assert not any(line.startswith("speculation") for line in lines)
    stored = StoredSpeculation(1, {"mode": "off", "threshold": 4}, 1000.5, "ann@host", "a test")
    assert ControlStore(tmp_path / "state", "tiny").replace(stored, {})
    with pytest.raises(RayWouldStartError):
        start(**served)
    line = "speculation as set by ann@host: mode off, threshold 4; "
    assert line + "`specdec speculation reset` takes it back" in lines


def test_a_state_directory_that_cannot_be(start, tiny_model_dir, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValueError, match=r"state_dir is .*file/state"):
        start(model=str(tiny_model_dir), state_dir=tmp_path / "file" / "state")


@pytest.fixture
def deployed(monkeypatch):
    """Deploys models beside applications with these prefixes; what is told, and the prefixes."""

    def deployed(*names, **before):
        there = {name: SimpleNamespace(route_prefix=prefix) for name, prefix in before.items()}
        monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=there))
        configs = [ServeConfig(served_model_name=name, ingress="serve") for name in names]
        routes = deploy([Served(config) for config in configs])
        listening, prefix = Listening("10.0.0.1", 9100, 8100), routes[names[0]]
        return _how_to_call(configs, listening, prefix, elapsed_s=1.0), list(routes.values())

    monkeypatch.setattr(serve, "run_many", lambda targets: None)
    return deployed


def test_the_first_of_several_has_the_root(deployed):
    said, routes = deployed("a", "b")
    assert routes == ["/", "/b"]
    assert "a, b are ready" in said
    assert "http://10.0.0.1:8100/health" in said
    assert "specdec generate --address 10.0.0.1:9100" in said


def test_who_joins_another_is_told_prefix_and_name(deployed):
    said, routes = deployed("a", theirs="/")
    assert routes == ["/a"]
    assert "10.0.0.1:9100, model a (" in said
    assert "http://10.0.0.1:8100/a/health" in said
    assert "curl http://10.0.0.1:8100/a/v1/models" in said


def test_a_redeployed_first_keeps_the_root(deployed):
    assert deployed("a", a="/", b="/b")[1] == ["/"]


def test_who_joins_another_may_not_hide_its_paths(deployed):
    assert deployed("metrics")[1] == ["/"]
    with pytest.raises(InvalidValueError, match="/metrics is a path of its API"):
        deployed("metrics", theirs="/")
