"""Two targets on one node and three draft workers on another, of which some are killed or stop."""

import json
import signal
import time
from contextlib import contextmanager

import pytest

from tests.e2e.two_nodes import cluster, joined_service, missing

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(580)]

SPECULATION = (
    '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold",'
    ' "speculation_threshold": 256, "async_drafting": "off"}'
)
NUM_STREAMS, NUM_TOKENS, DEADLINE_S = 8, 200, 120.0
NUM_WORKERS = 3


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("pool")
    flags = ["--model", str(tiny_model_dir), "--speculative-config", SPECULATION]
    flags += ["--num-replicas", "2", "--routing-policy", "random"]
    flags += ["--min-draft-workers", str(NUM_WORKERS), "--max-draft-workers", str(NUM_WORKERS)]
    flags += ["--target-labels", "role=target", "--draft-labels", "role=draft"]
    flags += ["--log-level", "info"]
    with (
        cluster() as made,
        joined_service(made, directory / "log", *flags) as running,
    ):
        yield running


def streams(service, *options):
    return service.ask(str(NUM_STREAMS), str(NUM_TOKENS), str(DEADLINE_S), *options)


def results_of(client_process, name):
    """Return the tokens of the streams, and their numbers of draft tokens."""
    output, errors = client_process.communicate(timeout=DEADLINE_S + 60)
    assert client_process.returncode == 0, errors
    answers = json.loads(output)
    assert [each["error"] for each in answers] == [""] * NUM_STREAMS
    pauses = sorted(round(1000 * each["longest_pause_s"]) for each in answers)
    num_drafted = [each["num_drafted"] for each in answers]
    print(f"{name}: {num_drafted} drafts, pauses {pauses} ms")
    return [each["token_ids"] for each in answers], num_drafted


@pytest.fixture(scope="module")
def plain(service):
    """Return the tokens without drafts, those of odd streams at temperature 0.8."""
    return results_of(streams(service, "plain"), "plain")[0]


def workers(service):
    return service.named(service.cluster.worker, ":DraftPool")


@pytest.fixture
def all_workers(service):
    """Return the processes of the draft workers, once all run."""
    ends_at_s = time.monotonic() + 120
    while len(found := workers(service)) < NUM_WORKERS:
        assert time.monotonic() < ends_at_s, "a worker was not replaced"
        time.sleep(0.5)
    time.sleep(10)  # until Routers see them, which load their models
    return found


@contextmanager
def under_load(service, plain, name):
    """Run streams, a second of them before the body; compare their tokens."""
    client_process = streams(service)
    time.sleep(1.5)
    yield
    tokens, num_drafted = results_of(client_process, name)
    assert tokens == plain
    assert all(num_drafted)


def wait_until_all_draft(service, plain):
    ends_at_s, num_drafted = time.monotonic() + 60, [0]
    while not all(num_drafted):
        assert time.monotonic() < ends_at_s, "a Router has not left the worker"
        tokens, num_drafted = results_of(streams(service), "without it")
        assert tokens == plain


def test_drafts_from_the_other_node_change_no_token(service, plain, all_workers):
    assert not service.named(service.cluster.head, ":DraftPool")
    with under_load(service, plain, "undisturbed"):
        pass


def test_streams_go_on_when_draft_workers_are_killed(service, plain, all_workers):
    for index, each in enumerate(all_workers[:2]):
        with under_load(service, plain, f"kill -9 of worker {index}"):
            each.kill()


def test_streams_go_on_when_draft_workers_stop(service, plain, all_workers):
    for index, each in enumerate(all_workers):
        with under_load(service, plain, f"SIGSTOP of worker {index}"):
            each.send_signal(signal.SIGSTOP)
        wait_until_all_draft(service, plain)
        each.send_signal(signal.SIGCONT)
