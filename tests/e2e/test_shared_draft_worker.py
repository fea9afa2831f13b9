# Modules: cluster.workers.shared_draft.shared_draft_worker
"""Two replicas that share draft workers: their tokens, and restarts of either side."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.e2e.conftest import running_service
from tests.e2e.streams import NUM_STREAMS, Streams
from tests.e2e.test_two_replicas import counts

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(500)]

STREAMS = Streams(max_tokens=120)
SPECULATION = (
    '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold",'
    ' "async_drafting": "outcomes"}'
)
SHARED = {
    "one": ["--replicas-per-draft-worker", "2"],
    "pool": [
        *("--max-draft-workers", "2", "--target-draft-utilization", "0.01"),
        *("--upscale-delay-s", "1", "--downscale-delay-s", "600"),
    ],
}


@pytest.fixture(scope="module", params=SHARED)
def service(request, tiny_model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("shared") / "log"
    flags = ["--speculative-config", SPECULATION, "--ingress", "serve", "--num-replicas", "2"]
    flags += [*SHARED[request.param], "--routing-policy", "random"]
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


@pytest.fixture(scope="module")
def plain(service):
    """Return the tokens without speculation."""
    return STREAMS.run_all(service, enabled=False)


@pytest.fixture
def workers(service):
    """Return the processes of the draft workers, once all run: the second one for the load."""
    num_workers = 2 if "--max-draft-workers" in service.process.cmdline() else 1

    def are_running():
        return STREAMS.run(service, 0) and len(service.processes(":DraftPool")) == num_workers

    wait_until(are_running)
    return service.processes(":DraftPool")


def counted(service, name):
    """Return a counter of each replica."""
    return {each: report["counts"][name] for each, report in counts(service).items()}


def num_drafted(service):
    """Return the draft tokens of each replica."""
    counted_by_name = counted(service, "speculation")
    return {name: each["num_draft_tokens"] for name, each in counted_by_name.items()}


def wait_until(condition, timeout_s=120):
    ends_at_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at_s, "it did not happen"
        time.sleep(0.5)


def draft_on_both(service, before):
    """Return whether both replicas have drafted since, with some more streams."""
    for index in range(4):
        STREAMS.run(service, index)
    time.sleep(1.5)  # replicas report each second
    return sum(tokens > before.get(name, 0) for name, tokens in num_drafted(service).items()) == 2


@contextmanager
def running_streams(service, plain):
    """Run streams that are under way in the body, and compare their tokens after it."""
    has_started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(STREAMS.run, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in running:
            assert has_started.acquire(timeout=60)
        yield
        assert [each.result() for each in running] == plain


def test_two_replicas_draft_on_workers_that_they_share(service, plain, workers):
    before = num_drafted(service)
    assert not service.processes("::DraftWorker"), "none of a replica alone"
    assert STREAMS.run_all(service) == plain
    wait_until(lambda: draft_on_both(service, before))


def test_streams_go_on_when_a_worker_is_killed_and_both_replicas_draft_again(
    service, plain, workers
):
    with running_streams(service, plain):
        workers[0].kill()
    wait_until(lambda: len(service.processes(":DraftPool")) == len(workers))
    before = num_drafted(service)
    wait_until(lambda: draft_on_both(service, before))


def test_streams_go_on_when_a_worker_stops_and_its_replica_leaves_it(service, plain, workers):
    """With one worker, the replicas go on without drafts."""
    for stopped in workers:
        before = num_drafted(service)
        stopped.send_signal(signal.SIGSTOP)
        try:
            with running_streams(service, plain):
                pass
            if len(workers) > 1:
                wait_until(lambda before=before: draft_on_both(service, before))
        finally:
            stopped.send_signal(signal.SIGCONT)
    before = num_drafted(service)
    wait_until(lambda: draft_on_both(service, before))


def test_a_replica_that_is_killed_leaves_its_seat_to_the_next_one(service, plain, workers):
    killed, kept = service.processes(":Router")
    killed.kill()
    before = num_drafted(service)
    wait_until(lambda: len(set(num_drafted(service)) - set(before)) == 1, 240)
    before = dict.fromkeys(num_drafted(service), 0) | before
    wait_until(lambda: draft_on_both(service, before), 240)
    assert kept.is_running()
    assert all(each.is_running() for each in workers), "the other replica has drafted there"
    assert STREAMS.run_all(service) == plain
