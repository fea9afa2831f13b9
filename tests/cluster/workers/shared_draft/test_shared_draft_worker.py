"""A shared draft worker without Ray: the limit of its start, and what it leaves on the node."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.workers.shared_draft.shared_draft_worker import SharedDraftWorker
from specdec.types.errors import DraftFailedError, ModelNotFoundError
from tests.cluster.workers.shared_drafts import spec_of


@pytest.fixture
def start():
    """Return a function that starts a worker with the model of a directory."""
    started = []

    def start_worker(model_dir, **changes):
        started.append(SharedDraftWorker(replace(spec_of(model_dir), **changes), 2, "w"))
        return started[-1]

    yield start_worker
    for worker in started:
        worker.stop()


def wait_until_ended(worker):
    for thread in threading.enumerate():
        if thread.name == "shared-draft":
            thread.join(20)
            assert not thread.is_alive()
    assert not Path(worker._directory.name).exists()


def test_a_model_that_is_not_loaded_in_time_is_reported(start, tiny_model_dir, monkeypatch):
    load, released = SharedDraftWorker._loaded, threading.Event()
    monkeypatch.setattr(
        SharedDraftWorker, "_loaded", lambda self: (released.wait(20), load(self))[1]
    )
    worker = start(tiny_model_dir, start_timeout_s=0.1)
    with pytest.raises(DraftFailedError, match=r"not loaded within 0.1 s \(start_timeout_s\)"):
        worker.wait_until_warm()
    released.set()
    worker._warm.result(20)
    worker.stop()
    wait_until_ended(worker)


def test_a_worker_that_stops_removes_its_directory(start, tiny_model_dir):
    worker = start(tiny_model_dir)
    worker.wait_until_warm()
    assert Path(worker._directory.name).is_dir()
    worker.stop()
    wait_until_ended(worker)


def test_a_model_that_does_not_load_leaves_no_directory(start, tmp_path):
    worker = start(tmp_path / "absent")
    with pytest.raises(ModelNotFoundError):
        worker.wait_until_warm()
    wait_until_ended(worker)


def test_a_step_that_fails_ends_the_process_and_leaves_no_directory(
    start, tiny_model_dir, monkeypatch
):
    worker, ended = start(tiny_model_dir), []
    directory = Path(worker._directory.name)
    monkeypatch.setattr(os, "_exit", lambda code: ended.append((code, directory.exists())))
    worker.wait_until_warm()
    loop = worker._warm.result()
    monkeypatch.setattr(loop, "_release_left", lambda: 1 / 0)
    loop._wake()
    wait_until_ended(worker)
    assert ended == [(1, False)]
