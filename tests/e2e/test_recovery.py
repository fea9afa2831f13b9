"""Tests that killed actors restart, and that running streams complete with the same tokens."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from specdec.client import Client
from tests.e2e.conftest import running_service
from tests.e2e.streams import NUM_STREAMS, Streams

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS = Streams(max_tokens=300)
DRAFT, SPARE = "DraftWorker.run", "DraftWorker.stand_by"
SPECULATION = '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold"}'


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("recovery") / "log"
    flags = ["--tensor-parallel-size", "2", "--speculative-config", SPECULATION]
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


def is_ready(service):
    try:
        return httpx.get(service.http_url + "/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def undisturbed(service):
    return STREAMS.run_all(service)


def wait_for(condition, what, service):
    """Wait until `condition()` holds; return the seconds."""
    started_at = time.monotonic()
    while time.monotonic() - started_at < 120:
        if condition():
            return time.monotonic() - started_at
        time.sleep(0.05)
    pytest.fail(f"{what} did not happen: {service.log.read_text()[-3000:]}")


@pytest.mark.parametrize(
    ("name", "index"),
    [(DRAFT, 0), ("TargetWorker", 0), ("TargetWorker", 1), ("ControlPlane", 0)],
)
def test_an_actor_killed_during_eight_streams_restarts(service, undisturbed, name, index):
    has_started = threading.Semaphore(0)
    old = {each.pid for each in service.processes(name)}
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(STREAMS.run, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert has_started.acquire(timeout=120), "a stream did not begin"
        service.processes(name)[index].kill()
        if name == "TargetWorker":
            wait_for(lambda: not is_ready(service), "not being ready", service)
            elapsed_s = wait_for(lambda: is_ready(service), "recovery", service)
            print(f"{name} {index}: streams went on after {elapsed_s:.1f} s")
        assert [each.result() for each in streams] == undisturbed
    elapsed_s = wait_for(
        lambda: (
            len(service.processes(name)) == len(old)
            and not {each.pid for each in service.processes(name)} & old
        ),
        "another worker",
        service,
    )
    print(f"{name} {index}: {elapsed_s:.1f} s after the streams had ended there was another")


def spare_of(service):
    """Wait until a spare has imported everything, and return it."""
    wait_for(lambda: len(service.processes(SPARE)) == 1, "a spare", service)
    return service.processes(SPARE)[0]


def num_restarts(service):
    text = httpx.get(service.http_url + "/metrics", timeout=30).text
    [line] = [each for each in text.splitlines() if each.startswith("specdec:draft_worker_restart")]
    return float(line.rsplit(" ", 1)[1])


def test_a_spare_replaces_a_draft_worker_killed_during_eight_streams(service, undisturbed):
    spare, restarts = spare_of(service), num_restarts(service)
    has_started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(STREAMS.run, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert has_started.acquire(timeout=120), "a stream did not begin"
        [lost] = service.processes(DRAFT)
        lost.kill()
        took_s = wait_for(lambda: num_restarts(service) > restarts, "a restart", service)
        print(f"the spare was warm and reported after {took_s:.1f} s")
        assert [each.result() for each in streams] == undisturbed
    assert service.processes(DRAFT) == [spare]
    assert spare_of(service) not in (spare, lost)
    assert "did not replace" not in service.log.read_text()


def test_a_spare_that_is_killed_is_replaced(service, undisturbed):
    lost = spare_of(service)
    drafting = service.processes(DRAFT)
    lost.kill()
    wait_for(lambda: service.processes(SPARE) not in ([lost], []), "another spare", service)
    assert service.processes(DRAFT) == drafting
    assert STREAMS.run(service, 1) == undisturbed[1]


def test_a_target_killed_twice_in_a_row_ends_no_stream(service, undisturbed):
    log_start = len(service.log.read_text())

    def num_logged(text):
        return service.log.read_text()[log_start:].count(text)

    has_started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(STREAMS.run, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert has_started.acquire(timeout=120), "a stream did not begin"
        for num_killed in range(2):
            wait_for(lambda n=num_killed: num_logged("streams continue") == n, "a start", service)
            service.processes("TargetWorker")[0].kill()
        assert [each.result() for each in streams] == undisturbed
    assert num_logged("streams continue") == 2


@pytest.mark.parametrize("name", ["TargetWorker", DRAFT])
def test_an_actor_killed_while_idle_restarts(service, undisturbed, name):
    [*old] = service.processes(name)
    old[0].kill()
    pids = {each.pid for each in old}
    elapsed_s = wait_for(
        lambda: (
            len(service.processes(name)) == len(old)
            and not {each.pid for each in service.processes(name)} & pids
            and is_ready(service)
        ),
        "another worker",
        service,
    )
    print(f"{name}: replaced after {elapsed_s:.1f} s")
    assert STREAMS.run(service, 1) == undisturbed[1]


def test_drafting_resumes_after_restarts(service, undisturbed):
    """Within seconds, since a restarted worker is installed between steps."""

    def is_drafting():
        with Client(service.grpc_address, timeout_s=60) as client:
            usage = client.generate("The river 1", STREAMS.params(1)).usage
        return usage.speculation.num_draft_tokens > 0

    wait_for(is_drafting, "drafting", service)
