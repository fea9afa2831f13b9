"""CPU scheduling policies of Ray and of models."""

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.workers.cpu_scheduling import (
    run_as_model,
    run_at_low_priority,
    starting_batch_work,
    threads_per_worker,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="policies are Linux's")

PRINT_POLICY = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]


def policy_of_a_child():
    return int(subprocess.run(PRINT_POLICY, check=True, capture_output=True).stdout)


def with_policy(policy, work):
    """Return the result of a function on a new thread, which begins with a policy.

    So the policy of the process that runs the tests does not matter, and does not change.
    """

    def run():
        try:
            os.sched_setscheduler(0, policy, os.sched_param(0))
        except PermissionError:
            pytest.skip("this process may not leave SCHED_IDLE")
        return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def own_policy():
    return os.sched_getscheduler(0)


def test_processes_started_meanwhile_are_batch_work_and_this_thread_is_not():
    def policies():
        with starting_batch_work():
            meanwhile = policy_of_a_child()
        return meanwhile, own_policy(), policy_of_a_child()

    expected = (os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_OTHER)
    assert with_policy(os.SCHED_OTHER, policies) == expected


def test_an_error_leaves_this_thread_as_it_was():
    def policy():
        with pytest.raises(RuntimeError), starting_batch_work():
            raise RuntimeError
        return own_policy()

    assert with_policy(os.SCHED_OTHER, policy) == os.SCHED_OTHER


def test_a_model_and_its_threads_use_the_default_policy():
    def policies():
        run_as_model()
        with ThreadPoolExecutor(1) as thread:
            return own_policy(), thread.submit(own_policy).result()

    assert with_policy(os.SCHED_BATCH, policies) == (os.SCHED_OTHER, os.SCHED_OTHER)


def test_another_policy_is_left_alone():
    def policies():
        run_as_model()
        with starting_batch_work():
            return own_policy(), policy_of_a_child()

    assert with_policy(os.SCHED_IDLE, policies) == (os.SCHED_IDLE, os.SCHED_IDLE)


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


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr("cluster.workers.cpu_scheduling.available_cpus", lambda: 8)
    assert [threads_per_worker(size) for size in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert [threads_per_worker(2, replicas) for replicas in (1, 2, 3)] == [4, 2, 1]


def test_work_at_low_priority_leaves_the_priority_of_the_process():
    niceness = []

    def work():
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    run_at_low_priority(work)
    assert niceness == [max(before, 10)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_an_error_of_work_at_low_priority_is_raised():
    with pytest.raises(ZeroDivisionError):
        run_at_low_priority(lambda: 1 / 0)
