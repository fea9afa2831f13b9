"""Two replicas of a service: prefix-aware routing, and orders to both of them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import pytest

from specdec.client import Client
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import running_service
from tests.specdec.tiny import tiny_llama_dir

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CONVERSATIONS, NUM_TURNS = 12, 4
TURN = "and then the river met another mountain, "
MAX_TOKENS = 6000


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two_replicas")
    model = tiny_llama_dir(directory / "model", max_positions=8192)
    flags = ["--ingress", "serve", "--num-replicas", "2"]
    with running_service(model, directory / "log", *flags) as service:
        yield service


def counts(service):
    """Return the latest report of each replica, with its counters."""
    answer = httpx.get(f"{service.http_url}/v1/admin/replicas", timeout=60).json()
    return {each["report"]["replica_id"]: each["report"] for each in answer["replicas"]}


def num_requests(reports):
    return sum(each["counts"]["num_requests"] for each in reports.values())


def num_running(service):
    return [each["num_running"] for each in counts(service).values()]


def http_turn(service, prompt):
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{service.http_url}/v1/completions", json=body, timeout=120).json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], usage["prompt_tokens"] - cached


def grpc_turn(service, prompt):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with Client(service.grpc_address, timeout_s=120) as client:
        completion = client.generate(prompt, params)
    usage = completion.usage
    return completion.text, usage.prompt_tokens


@pytest.mark.parametrize("turn", [http_turn, grpc_turn])
def test_conversations_stay_on_their_replicas_and_both_are_used(two_replicas, turn):
    name = turn.__name__
    texts = [f"{name} {i}: once upon a time " + TURN * 3 for i in range(NUM_CONVERSATIONS)]
    before = counts(two_replicas)
    assert len(before) == 2
    for _ in range(NUM_TURNS):
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda text: turn(two_replicas, text), texts))
        texts = [text + answer + TURN for text, (answer, _) in zip(texts, answers, strict=True)]
    if turn is http_turn:
        # A turn adds TURN and the end of the answer before; less than two of its blocks remain.
        assert max(computed for _, computed in answers) < len(TURN) + 8 + 32
    total = num_requests(before) + NUM_CONVERSATIONS * NUM_TURNS
    wait_until(lambda: num_requests(counts(two_replicas)) == total)
    wait_until(lambda: num_running(two_replicas) == [0, 0])
    after = counts(two_replicas)
    both = [difference(before[each], after[each]) for each in after]
    requests, computed = zip(*both, strict=True)
    assert max(requests) <= 0.65 * sum(requests)
    prompts = NUM_CONVERSATIONS * len(texts[0])
    assert sum(computed) < 1.2 * prompts, "most prompts were computed once"


def difference(before, after):
    """Return requests and computed prompt tokens between two reports of a replica."""
    before, after = before["counts"], after["counts"]
    names = ("num_requests", "num_prompt_tokens", "num_cached_tokens")
    requests, prompt, cached = (after[name] - before[name] for name in names)
    return requests, prompt - cached


def test_the_caches_of_both_replicas_are_emptied(two_replicas):
    prompts = [f"flushed {i} " + TURN * 3 for i in range(6)]
    first, cached = ([http_turn(two_replicas, prompt)[1] for prompt in prompts] for _ in range(2))
    assert max(cached) < min(first)
    flush = partial(httpx.post, f"{two_replicas.http_url}/flush_cache", json={}, timeout=60)
    wait_until(lambda: flush().status_code == 200)  # 400 while the last step is collected
    assert [http_turn(two_replicas, prompt)[1] for prompt in prompts] == first


def test_an_abort_reaches_requests_on_both_replicas(two_replicas):
    with ExitStack() as streams:
        events = [streams.enter_context(generate(two_replicas, number)) for number in range(4)]
        firsts = [next(each) for each in events]
        assert all(each["meta_info"]["finish_reason"] is None for each in firsts)
        wait_until(lambda: num_running(two_replicas) == [2, 2])
        for number in range(4):
            answer = httpx.post(
                f"{two_replicas.http_url}/abort_request", json={"rid": f"r{number}"}
            )
            assert answer.status_code == 200
        lasts = [list(each)[-1] for each in events]
    assert all("error" in each for each in lasts), "no stream is complete"
    wait_until(lambda: num_running(two_replicas) == [0, 0])


@contextmanager
def generate(service, number):
    """Yield the events of a long stream of SGLang's API."""
    params = {"max_new_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
    body = {"text": f"{number} begins " * 20, "sampling_params": params, "stream": True}
    body["rid"] = f"r{number}"
    with httpx.stream("POST", f"{service.http_url}/generate", json=body, timeout=120) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        yield (json.loads(line) for line in lines if line != "[DONE]")


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
