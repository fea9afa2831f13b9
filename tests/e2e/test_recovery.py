"""Tests that killed actors restart, and that running streams complete with the same tokens."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from specdec.client import Client
from specdec.types.sampling_params import SamplingParams
from tests.e2e.conftest import running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STREAMS = 8
DRAFT, SPARE = "DraftWorker.run", "DraftWorker.stand_by"
SPECULATION = '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold"}'


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("recovery") / "log"
    flags = ["--tensor-parallel-size", "2", "--speculative-config", SPECULATION]
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


def processes(service, name):
    """Return the processes of the actors with this name."""
    return [each for each in service.descendants() if name in command_of(each)]


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has just ended
        return ""


def is_ready(service):
    try:
        return httpx.get(service.http_url + "/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def params(index):
    """Return the parameters of a stream: half are sampled, and all are long enough to interrupt."""
    return SamplingParams(
        temperature=0.8 * (index % 2), seed=index, max_tokens=300, ignore_eos=True
    )


def stream(service, index, has_started=None):
    """Run one stream and return its tokens; release `has_started` at the first ones."""
    token_ids = []
    with Client(service.grpc_address, timeout_s=240) as client:
        for chunk in client.generate_stream(f"The river {index}", params(index)):
            if has_started is not None and not token_ids:
                has_started.release()
            token_ids.extend(chunk.token_ids)
    return token_ids


@pytest.fixture(scope="module")
def undisturbed(service):
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(lambda index: stream(service, index), range(NUM_STREAMS)))


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
    old = {each.pid for each in processes(service, name)}
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert has_started.acquire(timeout=120), "a stream did not begin"
        processes(service, name)[index].kill()
        if name == "TargetWorker":
            wait_for(lambda: not is_ready(service), "not being ready", service)
            elapsed_s = wait_for(lambda: is_ready(service), "recovery", service)
            print(f"{name} {index}: streams went on after {elapsed_s:.1f} s")
        assert [each.result() for each in streams] == undisturbed
    elapsed_s = wait_for(
        lambda: (
            len(processes(service, name)) == len(old)
            and not {each.pid for each in processes(service, name)} & old
        ),
        "another worker",
        service,
    )
    print(f"{name} {index}: {elapsed_s:.1f} s after the streams had ended there was another")


def spare_of(service):
    """Wait until a spare has imported everything, and return it."""
    wait_for(lambda: len(processes(service, SPARE)) == 1, "a spare", service)
    return processes(service, SPARE)[0]


def num_restarts(service):
    text = httpx.get(service.http_url + "/metrics", timeout=5).text
    [line] = [each for each in text.splitlines() if each.startswith("specdec:draft_worker_restart")]
    return float(line.rsplit(" ", 1)[1])


def test_a_spare_replaces_a_draft_worker_killed_during_eight_streams(service, undisturbed):
    spare, restarts = spare_of(service), num_restarts(service)
    has_started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert has_started.acquire(timeout=120), "a stream did not begin"
        [lost] = processes(service, DRAFT)
        lost.kill()
        took_s = wait_for(lambda: num_restarts(service) > restarts, "a restart", service)
        print(f"the spare was warm and reported after {took_s:.1f} s")
        assert [each.result() for each in streams] == undisturbed
    assert processes(service, DRAFT) == [spare]
    assert spare_of(service) not in (spare, lost)
    assert "did not replace" not in service.log.read_text()


def test_a_spare_that_is_killed_is_replaced(service, undisturbed):
    lost = spare_of(service)
    drafting = processes(service, DRAFT)
    lost.kill()
    wait_for(lambda: processes(service, SPARE) not in ([lost], []), "another spare", service)
    assert processes(service, DRAFT) == drafting
    assert stream(service, 1) == undisturbed[1]


def test_a_target_killed_twice_in_a_row_ends_no_stream(service, undisturbed):
    log_start = len(service.log.read_text())

    def num_logged(text):
        return service.log.read_text()[log_start:].count(text)

    has_started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert has_started.acquire(timeout=120), "a stream did not begin"
        for num_killed in range(2):
            wait_for(lambda n=num_killed: num_logged("streams continue") == n, "a start", service)
            processes(service, "TargetWorker")[0].kill()
        assert [each.result() for each in streams] == undisturbed
    assert num_logged("streams continue") == 2


@pytest.mark.parametrize("name", ["TargetWorker", DRAFT])
def test_an_actor_killed_while_idle_restarts(service, undisturbed, name):
    [*old] = processes(service, name)
    old[0].kill()
    pids = {each.pid for each in old}
    elapsed_s = wait_for(
        lambda: (
            len(processes(service, name)) == len(old)
            and not {each.pid for each in processes(service, name)} & pids
            and is_ready(service)
        ),
        "another worker",
        service,
    )
    print(f"{name}: replaced after {elapsed_s:.1f} s")
    assert stream(service, 1) == undisturbed[1]


def test_drafting_resumes_after_restarts(service, undisturbed):
    """Within seconds, since a restarted worker is installed between steps."""

    def is_drafting():
        with Client(service.grpc_address, timeout_s=60) as client:
            usage = client.generate("The river 1", params(1)).usage
        return usage.speculation.num_draft_tokens > 0

    wait_for(is_drafting, "drafting", service)
