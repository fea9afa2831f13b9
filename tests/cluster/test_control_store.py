"""What operators have set, on disk."""

import multiprocessing
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.control_store import ControlStore, StoredSpeculation, state_dir
from specdec.errors import InvalidValueError

FIRST = StoredSpeculation(1, {"mode": "off", "threshold": 4}, 1000.5, "ann@host", "a test")


@pytest.fixture
def store(tmp_path):
    return ControlStore(tmp_path / "state", "tiny")


def test_nothing_is_stored_at_first(store):
    assert store.read() == StoredSpeculation()


def test_what_was_written_is_read_again_by_another(store, tmp_path):
    assert store.replace(FIRST)
    assert ControlStore(tmp_path / "state", "tiny").read() == FIRST


def test_only_the_version_after_the_present_one_is_written(store):
    assert store.replace(FIRST)
    second = replace(FIRST, version=2, reason="again")
    assert store.replace(second)
    for late in (
        replace(FIRST, reason="late"),
        replace(FIRST, version=2),
        replace(FIRST, version=4),
    ):
        assert not store.replace(late)
    assert store.read() == second


def test_services_that_share_a_directory_share_nothing_else(store, tmp_path):
    other = ControlStore(tmp_path / "state", "other")
    assert store.replace(FIRST)
    assert other.read() == StoredSpeculation()
    assert other.replace(replace(FIRST, reason="mine"))
    assert store.read() == FIRST


def _write_and_die(directory):
    ControlStore(directory, "tiny").replace(FIRST)
    os.kill(os.getpid(), signal.SIGKILL)


def test_it_outlasts_a_kill(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert ControlStore(tmp_path, "tiny").read() == FIRST


def test_others_may_not_look_into_a_directory_that_it_makes(store, tmp_path):
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_a_directory_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        InvalidValueError, match=r"state_dir is .*a directory that can be written to"
    ):
        ControlStore(tmp_path / "file" / "state", "tiny")


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "control.sqlite3").write_text("nonsense " * 100)
    with pytest.raises(InvalidValueError, match="file is not a database"):
        ControlStore(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/var/state", "/var/state/specdec"), ("relative", "/home/ann/.local/state/specdec")],
)
def test_where_it_is_by_default(monkeypatch, variable, expected):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_STATE_HOME", variable)
    assert state_dir(None) == Path(expected)
