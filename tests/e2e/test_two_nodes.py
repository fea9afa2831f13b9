"""Tests of target and draft model on two Ray nodes, with packet loss and a failing network."""

import json
import time

import pytest

from tests.e2e.two_nodes import cluster, joined_service, missing, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DRAFT = (
    '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold",'
    ' "speculation_threshold": 256, "draft_tensor_parallel_size": 1}'
)
NUM_STREAMS, NUM_TOKENS, DEADLINE_S = 4, 150, 120.0


@pytest.fixture(scope="module")
def service(tiny_model_dir, tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("nodes")
    flags = ["--model", str(tiny_model_dir), "--speculative-config", DRAFT, "--log-level", "info"]
    flags += ["--target-labels", "role=target", "--draft-labels", "role=draft"]
    with (
        cluster() as made,
        joined_service(made, directory / "log", *flags) as running,
    ):
        yield running


def results_of(client_process):
    output, errors = client_process.communicate(timeout=DEADLINE_S + 60)
    assert client_process.returncode == 0, errors
    return json.loads(output)


def streams(service, num_tokens=NUM_TOKENS):
    return service.ask(str(NUM_STREAMS), str(num_tokens), str(DEADLINE_S))


@pytest.fixture(scope="module")
def undisturbed(service):
    answers = results_of(streams(service))
    assert all(not each["error"] for each in answers)
    assert all(each["num_drafted"] > 0 for each in answers)
    return [each["token_ids"] for each in answers]


def tokens_of(answers):
    assert [each["error"] for each in answers] == [""] * NUM_STREAMS
    return [each["token_ids"] for each in answers]


def test_each_model_is_on_the_node_with_its_labels(service, undisturbed):
    made = service.cluster
    for name, here, there in (
        ("TargetWorker", made.head, made.worker),
        (":Router", made.head, made.worker),
        ("DraftWorker", made.worker, made.head),
    ):
        assert service.named(here, name), f"{name} is not on {here}"
        assert not service.named(there, name), f"{name} is on {there}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "already runs on this cluster; stop it, or set another served_model_name"),
        (["--served-model-name", "b", "--target-labels", "role=none"], "target_labels is"),
    ],
)
def test_an_impossible_deployment_is_rejected(service, tiny_model_dir, tmp_path, flags, message):
    log = tmp_path / "log"
    second = serving(service.cluster, log, "--model", str(tiny_model_dir), *flags)
    assert second.wait(60) == 2
    assert message in log.read_text()
    assert not any(each["error"] for each in results_of(streams(service, num_tokens=5)))


def test_packet_loss_of_30_percent_does_not_change_streams(service, undisturbed):
    service.cluster.lose_packets(0.3)
    try:
        answers = results_of(streams(service))
    finally:
        service.cluster.lose_none()
    assert tokens_of(answers) == undisturbed
    print("under loss:", [round(each["took_s"], 1) for each in answers], "s")


def has_logged(service, text, since):
    return text in service.log.read_text()[since:]


def seconds_until(condition, timeout_s):
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at < timeout_s, "it did not happen"
        time.sleep(0.1)
    return time.monotonic() - started_at


def test_streams_continue_without_drafts_if_the_link_fails(service, undisturbed):
    """Last in this file, since Ray marks the other node as dead and ends its processes."""
    since = len(service.log.read_text())
    client_process = streams(service)
    time.sleep(1.0)
    service.cluster.lose_packets(1)
    detected_s = seconds_until(lambda: has_logged(service, "going on without drafts", since), 10.0)
    answers = results_of(client_process)
    assert tokens_of(answers) == undisturbed
    slowest_s = max(each["took_s"] for each in answers)
    assert slowest_s < DEADLINE_S
    again = results_of(streams(service))
    assert tokens_of(again) == undisturbed
    print(f"detected after {detected_s:.1f} s; the slowest stream took {slowest_s:.1f} s")
