"""Ranks of one target on two Ray nodes: equal tokens, and the loss of ranks, node and network."""

import json
import signal
import time
from contextlib import contextmanager

import psutil
import pytest

from specdec import LLM, SamplingParams
from tests.e2e.two_nodes import cluster, joined_service, missing
from tests.specdec.heads import fitted_medusa_dir

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

POLICY = {"num_speculative_tokens": 3, "policy": "threshold", "speculation_threshold": 256}
NUM_STREAMS, NUM_TOKENS, DEADLINE_S = 4, 150, 150.0
NUM_RANKS = 3


@pytest.fixture(scope="module")
def nodes():
    if reason := missing():
        pytest.skip(reason)
    with cluster() as made:
        yield made


def served(nodes, model, directory, method, *more, placement="spread"):
    flags = ["--model", str(model), "--tensor-parallel-size", str(NUM_RANKS)]
    flags += ["--target-placement", placement, "--log-level", "info"]
    flags += ["--speculative-config", json.dumps(POLICY | method)]
    return joined_service(nodes, directory / "log", *flags, *more)


@pytest.fixture(scope="module")
def of_one_rank(tiny_model_dir):
    """Return the tokens of a single rank without drafts, those of odd streams at 0.8."""
    indices = range(NUM_STREAMS)
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    params = [SamplingParams(temperature=0.8 * (each % 2), seed=each, **common) for each in indices]
    with LLM(model=str(tiny_model_dir), max_model_len=512) as llm:
        answers = llm.generate([f"The river {each}" for each in indices], params)
    return [list(each.outputs[0].token_ids) for each in answers]


@contextmanager
def streaming(service, of_one_rank, name):
    """Run streams, a second of them before the body, which must give the tokens of one rank."""
    client_process = service.ask(str(NUM_STREAMS), str(NUM_TOKENS), str(DEADLINE_S))
    time.sleep(1.0)
    yield
    output, errors = client_process.communicate(timeout=DEADLINE_S + 60)
    assert client_process.returncode == 0, errors
    answers = json.loads(output)
    assert [each["error"] for each in answers] == [""] * NUM_STREAMS
    assert [each["token_ids"] for each in answers] == of_one_rank
    assert all(each["num_drafted"] > 0 for each in answers)
    print(f"{name}: {max(each['took_s'] for each in answers):.1f} s")


@pytest.mark.parametrize(
    ("method", "placement", "exchange"),
    [("ngram", "pack", "shared memory"), ("medusa", "spread", "encrypted sockets")],
)
def test_drafts_of_the_ranks_and_of_lookups_change_no_token(
    nodes, tiny_model_dir, tmp_path, of_one_rank, method, placement, exchange
):
    settings = {"method": method, "prompt_lookup_min": 1}
    if method == "medusa":
        head = fitted_medusa_dir(tiny_model_dir, tmp_path, [list(range(3, 30))])
        settings = {"method": method, "model": str(head)}
    with (
        served(nodes, tiny_model_dir, tmp_path, settings, placement=placement) as service,
        streaming(service, of_one_rank, method),
    ):
        assert f"exchanges tensors by {exchange}" in service.log.read_text()


def test_a_node_that_disappears_changes_no_token(nodes, tiny_model_dir, tmp_path, of_one_rank):
    """No packet reports its end. The draft model is on the node that remains."""
    on_head = ("--draft-labels", "role=target")
    with (
        served(nodes, tiny_model_dir, tmp_path, {"method": "draft_model"}, *on_head) as service,
        streaming(service, of_one_rank, "loss of a node"),
    ):
        nodes.lose_packets(1)
        nodes.end_worker()
        time.sleep(10)
        nodes.lose_none()
        nodes.start_worker()


@pytest.fixture(scope="module")
def service(nodes, tiny_model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("nodes")
    with served(nodes, tiny_model_dir, directory, {"method": "draft_model"}) as running:
        yield running


def ranks_on(service, namespace):
    return service.named(namespace, "TargetWorker")


def test_ranks_on_both_nodes_change_no_token(service, of_one_rank):
    made = service.cluster
    num_ranks = [len(ranks_on(service, each)) for each in (made.head, made.worker)]
    assert sum(num_ranks) == NUM_RANKS
    assert all(num_ranks)
    assert "exchanges tensors by encrypted sockets, and sums gathered" in service.log.read_text()
    with streaming(service, of_one_rank, "undisturbed"):
        pass


@pytest.mark.parametrize("node", ["head", "worker"])
def test_a_killed_rank_changes_no_token(service, of_one_rank, node):
    with streaming(service, of_one_rank, f"kill -9 on the {node}"):
        ranks_on(service, getattr(service.cluster, node))[0].kill()


def test_a_stopped_rank_changes_no_token(service, of_one_rank):
    """The other ranks wait for it in a collective, and are ended with it."""
    victims = [*ranks_on(service, service.cluster.head), *ranks_on(service, service.cluster.worker)]
    with streaming(service, of_one_rank, "SIGSTOP on the worker"):
        ranks_on(service, service.cluster.worker)[0].send_signal(signal.SIGSTOP)
    assert not [each for each in victims if each.is_running()]


def test_a_partition_changes_no_token(service, of_one_rank):
    victims = [*ranks_on(service, service.cluster.head), *ranks_on(service, service.cluster.worker)]
    with streaming(service, of_one_rank, "partition of 10 s"):
        service.cluster.lose_packets(1)
        time.sleep(10)
        service.cluster.lose_none()
    _, left = psutil.wait_procs(victims, timeout=30)
    assert left == []
