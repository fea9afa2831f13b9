"""A shared draft worker without Ray: the limit of its start, and what it leaves on the node."""

import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.workers.shared_draft.shared_draft_worker import SharedDraftWorker
from specdec.types.errors import DraftFailedError, ModelNotFoundError
from tests.cluster.workers.shared_drafts import spec_of


@pytest.fixture
def directory(monkeypatch):
    """Return the directory below which workers have theirs; its path is short, for sockets."""
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


@pytest.fixture
def start(directory):
    """Return a function that starts a worker with the model of a directory."""
    started = []

    def start_worker(model_dir, **changes):
        started.append(SharedDraftWorker(replace(spec_of(model_dir), **changes), 2, "w"))
        return started[-1]

    yield start_worker
    for worker in started:
        worker.loop.stop()


def wait_until_ended(directory):
    for thread in threading.enumerate():
        if thread.name == "shared-draft":
            thread.join(20)
            assert not thread.is_alive()
    assert not list(directory.iterdir())


@pytest.mark.parametrize("loads_later", [True, False])
def test_a_model_that_is_not_loaded_in_time_is_reported(
    start, directory, tiny_model_dir, monkeypatch, loads_later
):
    load, released = SharedDraftWorker._loaded, threading.Event()

    def load_late(worker):
        released.wait(20)
        return load(worker) if loads_later else 1 / 0

    monkeypatch.setattr(SharedDraftWorker, "_loaded", load_late)
    with pytest.raises(DraftFailedError, match=r"not loaded within 0.1 s \(start_timeout_s\)"):
        start(tiny_model_dir, start_timeout_s=0.1)
    released.set()
    wait_until_ended(directory)


def test_a_worker_that_stops_removes_its_directory(start, directory, tiny_model_dir):
    worker = start(tiny_model_dir)
    assert len(list(directory.iterdir())) == 1
    worker.loop.stop()
    wait_until_ended(directory)


def test_a_model_that_does_not_load_leaves_no_directory(start, directory):
    with pytest.raises(ModelNotFoundError):
        start(directory / "absent")
    wait_until_ended(directory)


def test_a_step_that_fails_ends_the_process_and_leaves_no_directory(
    start, directory, tiny_model_dir, monkeypatch
):
    loop, ended = start(tiny_model_dir).loop, []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append((code, list(directory.iterdir()))))
    monkeypatch.setattr(loop, "_release_left", lambda: 1 / 0)
    loop._wake()
    wait_until_ended(directory)
    assert ended == [(1, [])]
