"""The operators' settings on disk."""

import multiprocessing
import os
import pickle
import signal
import sqlite3
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.control import store as control_store
from cluster.control.store import ControlStore, StoredSpeculation, state_dir
from specdec.types.errors import InvalidValueError, StorageError
from tests.cluster.full_disk import fill_disk

FIRST = StoredSpeculation(1, {"mode": "off", "threshold": 4}, 1000.5, "ann@host", "a test")


@pytest.fixture
def store(tmp_path):
    return ControlStore(tmp_path / "state", "tiny")


def test_a_new_store_is_empty(store):
    assert store.read() == StoredSpeculation()


def test_another_store_reads_what_was_written(store, tmp_path):
    assert store.replace(FIRST, {})
    assert ControlStore(tmp_path / "state", "tiny").read() == FIRST


def test_only_the_next_version_is_written(store):
    assert store.replace(FIRST, {})
    second = replace(FIRST, version=2, reason="again")
    assert store.replace(second, {})
    for late in (
        replace(FIRST, reason="late"),
        replace(FIRST, version=2),
        replace(FIRST, version=4),
    ):
        assert not store.replace(late, {})
    assert store.read() == second


def test_services_that_share_a_directory_are_independent(store, tmp_path):
    other = ControlStore(tmp_path / "state", "other")
    assert store.replace(FIRST, {})
    assert other.read() == StoredSpeculation()
    assert other.replace(replace(FIRST, reason="mine"), {})
    assert store.read() == FIRST


def _write_and_die(directory):
    ControlStore(directory, "tiny").replace(FIRST, {})
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_write_survives_a_kill(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert ControlStore(tmp_path, "tiny").read() == FIRST


def test_a_new_directory_is_private(store, tmp_path):
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_a_directory_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        InvalidValueError, match=r"state_dir is .*a directory that can be written to"
    ):
        ControlStore(tmp_path / "file" / "state", "tiny")


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "control.sqlite3").write_text("nonsense " * 100)
    with pytest.raises(InvalidValueError, match="file is not a database"):
        ControlStore(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/var/state", "/var/state/specdec"), ("relative", "/home/ann/.local/state/specdec")],
)
def test_the_default_directory(monkeypatch, variable, expected):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_STATE_HOME", variable)
    assert state_dir(None) == Path(expected)


def test_changes_are_listed_newest_first_in_pages(store):
    for version in range(1, 6):
        assert store.replace(replace(FIRST, version=version), {"threshold": version})
    assert [each.version for each in store.changes(None, 2)] == [5, 4]
    assert [each.change for each in store.changes(4, 9)] == [{"threshold": v} for v in (3, 2, 1)]


def test_a_conflicting_change_is_not_in_the_log(store):
    store.replace(FIRST, {"mode": "off"})
    assert not store.replace(replace(FIRST, reason="late"), {"mode": "on"})
    assert [each.change for each in store.changes(None, 9)] == [{"mode": "off"}]


def test_the_log_is_bounded(store, monkeypatch):
    monkeypatch.setattr(control_store, "_MAX_AUDIT_ENTRIES", 3)
    for version in range(1, 8):
        store.replace(replace(FIRST, version=version), {})
    assert [each.version for each in store.changes(None, 99)] == [7, 6, 5]


def test_a_full_disk_is_reported_and_changes_nothing(store, tmp_path, monkeypatch):
    assert store.replace(FIRST, {})
    fill_disk(monkeypatch)
    second = replace(FIRST, version=2, reason="x" * 100_000)
    with pytest.raises(StorageError, match="database or disk is full") as caught:
        store.replace(second, {})
    assert str(tmp_path / "state" / "control.sqlite3") in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason
    assert store.read() == FIRST
    monkeypatch.undo()
    assert store.replace(second, {})


def earlier_file(directory):
    """Write a file in the format of the first release."""
    with closing(sqlite3.connect(directory / "control.sqlite3")) as connection, connection:
        connection.execute(
            "CREATE TABLE speculation (service TEXT PRIMARY KEY, version INTEGER NOT NULL, "
            "overrides TEXT NOT NULL, updated_at_s REAL NOT NULL, updated_by TEXT NOT NULL, "
            "reason TEXT NOT NULL) STRICT"
        )
        values = ("tiny", 3, '{"mode": "off"}', 1000.5, "ann", "why")
        connection.execute("INSERT INTO speculation VALUES (?, ?, ?, ?, ?, ?)", values)


def test_a_file_of_the_first_format_is_migrated(tmp_path):
    earlier_file(tmp_path)
    expected = StoredSpeculation(3, {"mode": "off"}, 1000.5, "ann", "why")
    for _ in range(2):  # the second time there is nothing left to do
        store = ControlStore(tmp_path, "tiny")
        assert (store.read(), store.changes(None, 9)) == (expected, [])
    assert store.replace(replace(FIRST, version=4, expires_at_s=2000.0), {"threshold": 4})
    assert store.read().expires_at_s == 2000.0


def test_a_file_of_a_later_format_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "control.sqlite3")) as connection:
        connection.execute("PRAGMA user_version = 3")
    with pytest.raises(InvalidValueError, match="of format 2 or earlier; this is of 3"):
        ControlStore(tmp_path, "tiny")
