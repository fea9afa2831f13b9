"""A rank of a model with recurrent layers is killed: its streams complete with the same tokens."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import running_service
from tests.e2e.streams import NUM_STREAMS, Streams
from tests.e2e.test_recovery import is_ready, wait_for
from tests.specdec.models.families import save_family
from tests.specdec.tiny import train_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

STREAMS = Streams(max_tokens=400)
SPECULATION = (
    '{"method": "ngram", "num_speculative_tokens": 4, "num_draft_tree_tokens": 8,'
    ' "policy": "threshold", "speculation_threshold": 256, "prompt_lookup_min": 1}'
)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    root = tmp_path_factory.mktemp("hybrid")
    save_family(root / "model", "qwen3-next", max_position_embeddings=512)
    train_tokenizer(383).save_pretrained(root / "model")
    flags = ["--tensor-parallel-size", "2", "--speculative-config", SPECULATION]
    with running_service(root / "model", root / "log", *flags) as service:
        yield service


@pytest.fixture(scope="module")
def undisturbed(service):
    """Return the tokens without drafts."""
    return STREAMS.run_all(service, enabled=False)


def test_drafts_change_no_token(service, undisturbed):
    assert STREAMS.run_all(service) == undisturbed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_during_eight_streams_restarts(service, undisturbed, rank):
    has_started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(STREAMS.run, service, i, has_started) for i in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert has_started.acquire(timeout=120), "a stream did not begin"
        service.processes("TargetWorker")[rank].kill()
        wait_for(lambda: not is_ready(service), "not being ready", service)
        wait_for(lambda: is_ready(service), "recovery", service)
        assert [each.result() for each in streams] == undisturbed
