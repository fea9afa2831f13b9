"""CPU scheduling policies of Ray and of models."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from cluster.workers.cpu_scheduling import run_as_model, starting_batch_work

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="policies are Linux's")

PRINT_POLICY = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]


def policy_of_a_child():
    return int(subprocess.run(PRINT_POLICY, check=True, capture_output=True).stdout)


def in_a_thread(work):
    """Return the result of a function on a new thread, whose policy ends with it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_processes_started_meanwhile_are_batch_work_and_this_thread_is_not():
    with starting_batch_work():
        assert policy_of_a_child() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_a_child() == os.SCHED_OTHER


def test_an_error_leaves_this_thread_as_it_was():
    with pytest.raises(RuntimeError), starting_batch_work():
        raise RuntimeError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_model_and_its_threads_use_the_default_policy():
    def policies():
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        run_as_model()
        return os.sched_getscheduler(0), in_a_thread(lambda: os.sched_getscheduler(0))

    assert in_a_thread(policies) == (os.SCHED_OTHER, os.SCHED_OTHER)


def test_another_policy_is_left_alone():
    def policies():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        run_as_model()
        with starting_batch_work():
            return os.sched_getscheduler(0), policy_of_a_child()

    assert in_a_thread(policies) == (os.SCHED_IDLE, os.SCHED_IDLE)


@pytest.mark.parametrize("name", ["sched_getscheduler", "sched_setscheduler"])
@pytest.mark.parametrize("policy", ["SCHED_OTHER", "SCHED_BATCH"])
@pytest.mark.parametrize("error", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_a_refused_system_call_is_ignored(monkeypatch, error, policy, name):
    asked = []

    def refuse(*_):
        asked.append(name)
        raise OSError(error, "refused")

    monkeypatch.setattr(os, "sched_getscheduler", lambda _: getattr(os, policy))
    monkeypatch.setattr(os, name, refuse)
    with starting_batch_work():
        run_as_model()
    assert asked
