# Modules: cluster.workers.shared_draft.shared_draft_worker
"""Two replicas that share a draft worker: their tokens, and restarts of either side."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

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


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("shared") / "log"
    flags = ["--speculative-config", SPECULATION, "--ingress", "serve", "--num-replicas", "2"]
    flags += ["--replicas-per-draft-worker", "2", "--routing-policy", "random"]
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


@pytest.fixture(scope="module")
def plain(service):
    """Return the tokens without speculation."""
    return STREAMS.run_all(service, enabled=False)


def num_drafted(service):
    """Return the draft tokens of each replica."""
    return {
        name: report["counts"]["speculation"]["num_draft_tokens"]
        for name, report in counts(service).items()
    }


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


def test_two_replicas_draft_on_one_worker(service, plain):
    before = num_drafted(service)
    assert len(service.processes("SharedDraftWorker")) == 1
    assert not service.processes("::DraftWorker"), "none of a replica alone"
    assert STREAMS.run_all(service) == plain
    wait_until(lambda: draft_on_both(service, before))


def test_streams_go_on_when_the_worker_is_killed_and_both_replicas_draft_again(service, plain):
    [worker] = service.processes("SharedDraftWorker")
    has_started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(STREAMS.run, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in running:
            assert has_started.acquire(timeout=60)
        worker.kill()
        assert [each.result() for each in running] == plain
    wait_until(lambda: len(service.processes("SharedDraftWorker")) == 1)
    before = num_drafted(service)
    wait_until(lambda: draft_on_both(service, before))


def test_a_replica_that_is_killed_leaves_its_seat_to_the_next_one(service, plain):
    [worker] = service.processes("SharedDraftWorker")
    killed, kept = service.processes(":Router")
    killed.kill()
    before = num_drafted(service)
    wait_until(lambda: len(set(num_drafted(service)) - set(before)) == 1, 240)
    before = dict.fromkeys(num_drafted(service), 0) | before
    wait_until(lambda: draft_on_both(service, before), 240)
    assert kept.is_running()
    assert worker.is_running(), "the other replica has drafted on it"
    assert STREAMS.run_all(service) == plain
