# Modules: cluster.serve.draft_pool
"""Two targets on one node and three draft workers on another: faults of workers and of the link.

The link delays each packet and loses one in a hundred.
"""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import httpx
import pytest

from specdec.client import Client
from specdec.types.reports.stats import SpeculationStats
from tests.chaos.history import FINISHED, Call, violations
from tests.e2e.link import Condition
from tests.e2e.streams import NUM_STREAMS, Streams
from tests.e2e.test_shared_draft_worker import wait_until
from tests.e2e.two_nodes import HEAD_OUTSIDE, cluster, joined_service, missing

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(580)]

SPECULATION = (
    '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold",'
    ' "speculation_threshold": 256, "async_drafting": "off"}'
)
STREAMS = Streams(max_tokens=400)
NUM_ROUTERS, NUM_WORKERS = 2, 3
DELAYS_S = {"1 ms": 0.001, "20 ms": 0.02}
LOSS = 0.01
PARTITION_S = 5.0
LATE, RESTARTS = "spec_decode_num_late_drafts", "draft_worker_restarts"


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("pool")
    flags = ["--host", "0.0.0.0", "--model", str(tiny_model_dir)]
    flags += ["--speculative-config", SPECULATION]
    flags += ["--num-replicas", str(NUM_ROUTERS), "--routing-policy", "random"]
    flags += ["--min-draft-workers", str(NUM_WORKERS), "--max-draft-workers", str(NUM_WORKERS)]
    flags += ["--target-labels", "role=target", "--draft-labels", "role=draft"]
    flags += ["--log-level", "info"]
    with (
        cluster() as made,
        joined_service(made, directory / "log", *flags) as running,
    ):
        yield running


@dataclass
class Stream:
    """A stream as its client sees it. arrivals_s: of its messages. speculation: its usage."""

    call: Call
    arrivals_s: list[float] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def num_steps(self):
        return len(self.call.tokens()) - self.speculation.num_accepted_tokens

    @property
    def num_without_drafts(self):
        return self.num_steps - self.speculation.num_drafts

    @property
    def step_s(self):
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / self.num_steps

    @property
    def longest_pause_s(self):
        return max(after - before for before, after in pairwise(self.arrivals_s))


def run(index, stream, **options):
    with Client(f"{HEAD_OUTSIDE}:9000", timeout_s=120) as client:
        params = STREAMS.params(index, **options)
        for chunk in client.generate_stream(f"The river {index}", params):
            stream.arrivals_s.append(time.monotonic())
            is_end = chunk.finish_reason is not None
            stream.call.receive(chunk.choice, chunk.token_ids, ends_choice=is_end)
            if chunk.usage is not None:
                stream.call.end(FINISHED, chunk.usage.completion_tokens)
                stream.speculation = chunk.usage.speculation or stream.speculation


@contextmanager
def streams(expected, **options):
    """Yield streams that have begun, and wait for their end.

    Those with odd numbers are sampled at temperature 0.8.
    """
    made = [Stream(Call(f"stream {i}", (tuple(each),))) for i, each in enumerate(expected)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(run, index, each, **options) for index, each in enumerate(made)]
        wait_until(lambda: all(each.arrivals_s for each in made) or any_failed(running))
        yield made
    for each in running:
        each.result()


def any_failed(running):
    return any(each.done() and each.exception() for each in running)


@pytest.fixture(scope="module")
def plain(service):
    """Return the streams without drafts."""
    with streams([()] * NUM_STREAMS, enabled=False) as found:
        pass
    return found


@pytest.fixture(params=DELAYS_S)
def condition(service, request):
    made = Condition(LOSS, DELAYS_S[request.param], seed=7)
    service.cluster.link.set(made)
    yield made
    service.cluster.lose_none()


def workers(service):
    return service.named(service.cluster.worker, ":DraftPool")


@pytest.fixture
def all_workers(service):
    """See `warm_workers`."""
    return warm_workers(service)


def warm_workers(service):
    """Return the processes of the draft workers, those with most Routers first, once all are warm.

    Both Routers have seats at the first two.
    """
    found = []

    def have_all_seats():
        warm = re.findall(r"\((\d+)\) the draft model is warm", service.log.read_text())
        found[:] = [each for each in workers(service) if str(each.pid) in warm]
        num_seats = sum(num_routers(service, each) for each in found)
        return len(found) == NUM_WORKERS and num_seats == NUM_ROUTERS

    wait_until(have_all_seats)
    return sorted(found, key=lambda each: -num_routers(service, each))


def num_routers(service, worker):
    """Return the number of Routers with a seat at a worker."""
    changes = re.findall(rf"\({worker.pid}\) Router (\d+) (.+)", service.log.read_text())
    return [*dict(changes).values()].count("is connected")


@contextmanager
def under_load(service, plain, name, **options):
    """Yield streams that have begun; check their history. options: of their speculation."""
    with streams([each.call.tokens() for each in plain], **options) as found:
        yield found
    step_s = median(each.step_s for each in plain)
    pauses = [max(each.longest_pause_s for each in some) / step_s for some in (found, plain)]
    print(
        f"{name}: {[each.num_without_drafts for each in found]} of"
        f" {[each.num_steps for each in found]} steps without drafts; longest pause"
        f" {pauses[0]:.0f} steps of {step_s * 1e3:.1f} ms, {pauses[1]:.0f} without drafts"
    )
    assert violations(each.call for each in found) == []


def total(service, *names):
    """Return the sum of counters of all replicas."""
    text = httpx.get(f"http://{HEAD_OUTSIDE}:8000/metrics", timeout=30).text
    pattern = rf"^specdec:(?:{'|'.join(names)})_total.* (\S+)$"
    return round(sum(map(float, re.findall(pattern, text, re.MULTILINE))))


@contextmanager
def fault(service):
    """Assert that a Router notices what is done to its worker in the body."""
    before = total(service, LATE, RESTARTS)
    yield
    wait_until(lambda: total(service, LATE, RESTARTS) > before)


def wait_until_all_draft(service, plain):
    def do_all_draft():
        with under_load(service, plain, "without them") as found:
            pass
        return all_draft(found)

    wait_until(do_all_draft)


def all_draft(found):
    return all(each.speculation.num_drafts for each in found)


def test_drafts_from_the_other_node_change_no_token(service, plain, all_workers, condition):
    assert not service.named(service.cluster.head, ":DraftPool")
    with under_load(service, plain, f"undisturbed, {condition}") as found:
        pass
    assert all_draft(found)


def test_streams_go_on_when_draft_workers_are_killed(service, plain, all_workers, condition):
    """First under streams without drafts: new workers take time from them, too."""
    with under_load(service, plain, f"kill -9 without drafts, {condition}", enabled=False):
        for each in all_workers[:2]:
            each.kill()
    again = warm_workers(service)
    with fault(service), under_load(service, plain, f"kill -9, {condition}"):
        for each in again[:2]:
            each.kill()
    wait_until_all_draft(service, plain)


def test_streams_go_on_when_draft_workers_stop(service, plain, all_workers, condition):
    try:
        with fault(service), under_load(service, plain, f"SIGSTOP, {condition}"):
            for each in all_workers[:2]:
                each.send_signal(signal.SIGSTOP)
        wait_until_all_draft(service, plain)
    finally:
        for each in all_workers[:2]:
            each.send_signal(signal.SIGCONT)


def test_streams_go_on_without_the_link(service, plain, all_workers, condition):
    with fault(service), under_load(service, plain, f"partition, {condition}"):
        service.cluster.lose_packets(1)
        time.sleep(PARTITION_S)
        service.cluster.link.set(condition)
    wait_until_all_draft(service, plain)
