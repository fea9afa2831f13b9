"""A private Ray: its token, its processes, and the variables that are restored."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import worker
from ray._private.utils import validate_socket_filepath
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode

from cluster.workers.ray import ray_runtime
from cluster.workers.ray.ray_runtime import RAY_ENVIRONMENT, LocalRay, TokenFile, start_ray


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Restore environment variables, which other tests share."""
    for name in (*RAY_ENVIRONMENT, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that it is put back
        monkeypatch.delenv(name)
    yield
    monkeypatch.undo()
    ray_runtime._authenticate({})


class Machine:
    """Records how Ray would be started, without starting it."""

    def __init__(self, monkeypatch):
        self.seen = []
        self.error = None
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(
            ray, "shutdown", lambda: monkeypatch.setattr(worker, "_global_node", None)
        )
        self._patch = monkeypatch

    def init(self, **settings):
        self.settings = settings
        token = AuthenticationTokenLoader.instance().get_raw_token()
        self.seen.append((get_authentication_mode(), token))
        if self.error is not None:
            raise self.error
        self._patch.setattr(worker, "_global_node", SimpleNamespace(all_processes={}))

    def shutdown(self):
        self._patch.setattr(worker, "_global_node", None)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def variables():
    return os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN")


def test_each_has_a_separate_token_even_if_ray_was_imported_before(machine):
    for _ in range(2):
        start_ray().stop()
    (mode, first), (again, second) = machine.seen
    assert mode == again == AuthenticationMode.TOKEN
    assert len({first, second, ""}) == 3
    assert variables() == (None, None)
    assert get_authentication_mode() != AuthenticationMode.TOKEN


def test_the_token_is_in_no_variable_and_ends_with_its_ray(machine):
    own = start_ray()
    path, token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]), machine.seen[0][1]
    assert path.read_text() == token
    assert token not in os.environ.values()
    own.stop()
    assert not path.exists()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_its_dashboard_which_runs_jobs_is_not_started(machine):
    start_ray().stop()
    assert machine.settings["include_dashboard"] is False


@pytest.mark.parametrize("fails", [False, True])
def test_variables_of_the_program_are_restored(machine, monkeypatch, fails):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    if fails:
        machine.error = RuntimeError("no room")
        with pytest.raises(RuntimeError, match="no room"):
            start_ray()
    else:
        own = start_ray()
        assert "RAY_AUTH_TOKEN" not in os.environ
        own.stop()
    assert machine.seen[0][1] != "mine"
    assert variables() == (None, "mine")
    header = AuthenticationTokenLoader.instance().get_token_for_http_header(ignore_auth_mode=True)
    assert "Bearer mine" in header.values(), "Ray has read it again"


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize(("length", "is_too_long"), [(36, False), (37, True)])
def test_its_sockets_fit_where_the_directory_of_temporary_files_has_a_long_path(
    machine, monkeypatch, caplog, name, length, is_too_long
):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    given = {"TMPDIR": "/t", name: "/" + "d" * (length - 1)}
    for each, value in given.items():
        monkeypatch.setenv(each, value)
    own = start_ray()
    assert (os.environ.get("RAY_TMPDIR") == "/tmp") is is_too_long
    assert (f"{name}={given[name]} is too long" in caplog.text) is is_too_long
    sockets = Path(get_default_ray_temp_dir(), "session_2026-12-01_01-43-24_405756_4194304/sockets")
    validate_socket_filepath(str(sockets / "plasma_store"))
    own.stop()
    assert os.environ.get("RAY_TMPDIR") == given.get("RAY_TMPDIR")


def test_a_start_that_takes_too_long_is_repeated(machine, monkeypatch, caplog):
    children = []

    def init(**_):
        monkeypatch.setattr(ray, "init", started)
        sleep = [sys.executable, "-Sc", "import time; print(flush=True); time.sleep(60)"]
        for word in ("", "/ray/raylet"):
            child = subprocess.Popen([*sleep, word], stdout=subprocess.PIPE)
            child.stdout.readline()  # just started, it may have no command line yet
            children.append(child)
        raise RuntimeError("The current node timed out during startup.")

    started = ray.init
    monkeypatch.setattr(ray, "init", init)
    start_ray().stop()
    ours, rays = children
    assert rays.wait(10) == -signal.SIGKILL
    assert ours.poll() is None
    ours.kill()
    ours.wait()
    assert "starting it again" in caplog.text


def test_a_start_that_never_succeeds_is_an_error(machine):
    machine.error = RuntimeError("The current node timed out during startup.")
    with pytest.raises(RuntimeError, match="timed out"):
        start_ray()
    assert len(machine.seen) == 3


def test_another_ray_that_the_program_has_started_since_is_left_alone(machine, monkeypatch):
    own = start_ray()
    other = SimpleNamespace(all_processes={})
    monkeypatch.setattr(worker, "_global_node", other)
    own.stop()
    assert worker._global_node is other
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_its_processes_are_those_in_rays_record():
    with subprocess.Popen(["sleep", "60"]) as ours, subprocess.Popen(["sleep", "60"]) as stranger:
        ended = subprocess.Popen(["true"])
        ended.wait()
        kinds = {"raylet": [SimpleNamespace(process=ours)], "log": [SimpleNamespace(process=ended)]}
        found = LocalRay(SimpleNamespace(all_processes=kinds), TokenFile(), {}).processes()
        for each in (ours, stranger):
            each.kill()
    assert [process.pid for process in found] == [ours.pid]
