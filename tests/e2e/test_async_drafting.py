"""Asynchronous drafting on the real service: the tokens of no speculation, whatever happens."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from specdec.client import AdminClient
from specdec.types.control import SpeculationChange
from tests.e2e.conftest import running_service
from tests.e2e.streams import NUM_STREAMS, Streams

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS = Streams(max_tokens=200)
SPECULATION = (
    '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold",'
    ' "async_drafting": "outcomes"}'
)


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("async") / "log"
    flags = ["--speculative-config", SPECULATION, "--no-spare-draft-worker"]
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


@pytest.fixture(scope="module")
def plain(service):
    """Return the tokens without speculation."""
    return STREAMS.run_all(service, enabled=False)


def metric(service, name):
    """Return the present sum of a counter's series."""
    text = httpx.get(service.http_url + "/metrics/replica", timeout=30).text
    lines = [each for each in text.splitlines() if each.startswith(f"specdec:{name}")]
    return sum(float(each.rsplit(" ", 1)[1]) for each in lines)


@pytest.mark.parametrize("num_streams", [1, NUM_STREAMS])
def test_drafts_ahead_are_used_and_change_no_token(service, plain, num_streams):
    # In a batch on busy cores a draft model as large as the target may always be late.
    name = "spec_decode_ahead_hits_total" if num_streams == 1 else "spec_decode_num_ahead_tokens"
    before = metric(service, name)
    assert STREAMS.run_all(service, num_streams) == plain[:num_streams]
    deadline_s = time.monotonic() + 30
    while metric(service, name) <= before:
        assert time.monotonic() < deadline_s, "nothing was drafted ahead"
        time.sleep(0.5)


def test_a_draft_worker_that_is_killed_while_it_drafts_ahead_changes_no_token(service, plain):
    has_started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(STREAMS.run, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert has_started.acquire(timeout=120), "a stream did not begin"
        [lost] = service.processes("DraftWorker.run")
        lost.kill()
        assert [each.result() for each in streams] == plain


def test_toggles_change_no_token(service, plain):
    with ThreadPoolExecutor(NUM_STREAMS) as pool, AdminClient(service.grpc_address) as admin:
        streams = [pool.submit(STREAMS.run, service, i) for i in range(NUM_STREAMS)]
        for index in range(6):
            time.sleep(0.3)
            admin.set_speculation(SpeculationChange(mode=("off", "on")[index % 2]))
        assert [each.result() for each in streams] == plain


def test_nothing_is_drafted_ahead_after_a_toggle_to_off(service, plain):
    name = "spec_decode_num_ahead_tokens_total"
    with AdminClient(service.grpc_address) as admin, ThreadPoolExecutor(1) as pool:
        has_started = threading.Semaphore(0)
        toggled = pool.submit(STREAMS.run, service, 0, has_started)
        assert has_started.acquire(timeout=120), "the stream did not begin"
        admin.set_speculation(SpeculationChange(mode="off"))
        try:
            assert toggled.result() == plain[0]
            before = metric(service, name)
            assert before > 0
            assert STREAMS.run_all(service, 2) == plain[:2]
            assert metric(service, name) == before
        finally:
            admin.set_speculation(SpeculationChange(mode="on"))
