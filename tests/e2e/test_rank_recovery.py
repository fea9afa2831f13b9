"""A rank with more than a target's KV is killed: its streams complete with the same tokens.

It has the states of recurrent layers, or also runs the draft model.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from specdec.client import Client
from tests.e2e.conftest import running_service
from tests.e2e.streams import NUM_STREAMS, Streams
from tests.e2e.test_recovery import is_ready, wait_for
from tests.specdec.models.families import save_family
from tests.specdec.tiny import disturbed_llama_dir, train_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS = Streams(max_tokens=400)
POLICY = {"policy": "threshold", "speculation_threshold": 256, "num_speculative_tokens": 4}


def recurrent(root, tiny_model_dir):
    """Write a model with recurrent layers; return it, and how to draft."""
    save_family(root / "model", "qwen3-next", max_position_embeddings=512)
    train_tokenizer(383).save_pretrained(root / "model")
    return root / "model", {"method": "ngram", "prompt_lookup_min": 1, "num_draft_tree_tokens": 8}


def colocated(root, tiny_model_dir):
    """Write a draft model for the ranks of the tiny target, some of whose drafts are rejected."""
    (root / "draft").mkdir()
    draft = disturbed_llama_dir(tiny_model_dir, root / "draft")
    return tiny_model_dir, {"method": "colocated_draft_model", "model": str(draft)}


@pytest.fixture(scope="module", params=[recurrent, colocated], ids=lambda each: each.__name__)
def service(request, tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    model, method = request.param(root, tiny_model_dir)
    flags = ["--tensor-parallel-size", "2", "--speculative-config", json.dumps(POLICY | method)]
    with running_service(model, root / "log", *flags) as service:
        yield service


@pytest.fixture(scope="module")
def undisturbed(service):
    """Return the tokens without drafts."""
    return STREAMS.run_all(service, enabled=False)


def num_accepted(service):
    """Return how many drafts of a stream are accepted now."""
    with Client(service.grpc_address, timeout_s=60) as client:
        usage = client.generate("The river 0", STREAMS.params(0)).usage
    return usage.speculation.num_accepted_tokens


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
    assert num_accepted(service) > 0
