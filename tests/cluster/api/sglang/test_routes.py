"""Routes of SGLang beside `/generate`: descriptions, health, the cache, and aborts."""

import asyncio
import time
from types import SimpleNamespace

import httpx
import pytest

from cluster.api.base.authentication import AdminAccess, ApiKey, ApiKeys
from cluster.api.http_app import make_app
from cluster.api.sglang.routes import _speculation_info
from cluster.replica.orders import AbortOrder
from specdec.config.speculative_keys import read_speculation
from specdec.engine.metrics.metrics import FIRST_TOKEN
from specdec.engine.requests.outputs import StepOutputs
from specdec.types.errors import OverloadedError
from specdec.types.request import Caller
from tests.cluster.api.openai.conftest import alone
from tests.cluster.api.sglang.test_generate import GREEDY, PROMPT, post
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def running_request(http, router, patch, **changes):
    """Start a request, and return its task once all its prompts run; it gets no further step."""
    engine = router.running_engine().thread._engine
    step, body = engine.step, {"text": PROMPT, "sampling_params": GREEDY, **changes}
    count = len(body["text"]) if isinstance(body["text"], list) else 1

    def until_all_run():
        if engine.stats().num_running < count:
            return step()
        time.sleep(0.001)
        return StepOutputs()

    patch.setattr(engine, "step", until_all_run)
    running = asyncio.create_task(http.post("/generate", json=body))
    await eventually(lambda: engine.stats().num_running == count)
    return running


async def test_the_model_and_the_server_are_described(http):
    model = (await http.get("/get_model_info")).json()
    assert model["model_path"] == "tiny", "no path of the machine"
    assert model["is_generation"] is True
    assert (await http.get("/model_info")).json() == model
    server = (await http.get("/get_server_info")).json()
    assert server["speculative_algorithm"] == "NGRAM"
    assert server["context_length"] == 512
    assert server["disable_radix_cache"] is False
    assert server["internal_states"][0]["num_running_reqs"] == 0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (None, (None, None, None)),
        ({"method": "ngram", "num_speculative_tokens": 3}, ("NGRAM", 3, 4)),
        ({"method": "draft_model", "model": "d", "num_speculative_tokens": 4},
         ("STANDALONE", 4, 5)),
        ({"method": "mtp", "num_speculative_tokens": 1}, ("NEXTN", 1, 2)),
        ({"method": "suffix", "num_speculative_tokens": 5, "num_draft_tree_tokens": 15},
         ("SUFFIX", 5, 16)),
    ],
)  # fmt: skip
async def test_speculation_is_reported_in_sglangs_names(keys, expected):
    config = read_speculation(keys)
    names = ("algorithm", "num_steps", "num_draft_tokens")
    info = _speculation_info(config)
    assert tuple(info[f"speculative_{name}"] for name in names) == expected


async def test_health_generate_makes_a_token(http, router):
    """It is no request of a client: neither rates nor latencies include it."""
    thread, metrics = router.running_engine().thread, router.metrics
    before, first = (await thread.stats()).counts, metrics[FIRST_TOKEN].read()
    assert (await http.get("/health_generate")).status_code == 200
    after = (await thread.stats()).counts
    assert after.num_generated_tokens == before.num_generated_tokens + 1
    assert (after.num_requests, metrics[FIRST_TOKEN].read()) == (before.num_requests, first)


async def test_a_full_queue_is_healthy(http, router, monkeypatch):
    async def full():
        raise OverloadedError("the queue is full")

    monkeypatch.setattr(router, "probe", full)
    assert (await http.get("/health_generate")).status_code == 200


class Stalled:
    """Stands for a function that does not return."""

    def __init__(self):
        self.was_cancelled = False

    async def __call__(self, *arguments, **options):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def test_health_generate_has_a_deadline(http, router, monkeypatch):
    monkeypatch.setattr(router, "probe", Stalled())
    response = await http.get("/health_generate", headers={"x-request-timeout-s": "0.05"})
    assert response.status_code == 504


async def test_health_generate_ends_with_its_connection(router, monkeypatch):
    stalled, statuses = Stalled(), []
    monkeypatch.setattr(router, "probe", stalled)
    messages = iter([{"type": "http.request", "body": b""}, {"type": "http.disconnect"}])

    async def receive():
        await asyncio.sleep(0.02)
        return next(messages)

    async def send(message):
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": "GET", "path": "/health_generate", "query_string": b"",
             "headers": [(b"host", b"test")], "client": ("192.0.2.7", 5000)}  # fmt: skip
    await make_app(lambda: router, lambda: alone(router))(scope, receive, send)
    assert stalled.was_cancelled
    assert statuses[0] == 499


async def test_the_cache_is_flushed_while_nothing_runs(http, router, monkeypatch):
    prompt = {"text": "Every spring the river " * 3, "sampling_params": {"max_new_tokens": 0}}
    await post(http, **prompt)
    assert (await post(http, **prompt))["meta_info"]["cached_tokens"] > 0
    assert (await http.post("/flush_cache")).status_code == 200, "SGLang's clients send no body"
    response = await http.post("/flush_cache", json={"empty_cache": True})
    assert response.status_code == 200
    form = await http.post("/flush_cache", content=b"a=b")
    assert form.json()["error"]["param"] == "content-type"
    assert (await post(http, **prompt))["meta_info"]["cached_tokens"] == 0
    by_aiohttp = {"content-type": "application/octet-stream"}  # of every request without a body
    reset = await http.post("/reset_prefix_cache", headers=by_aiohttp)
    assert reset.status_code == 200, "vLLM's name"
    for kind, body in (("application/octet-stream", b"{}"), ("text/plain", b"")):
        refused = await http.post("/flush_cache", content=body, headers={"content-type": kind})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "content-type")
    assert (await post(http, **prompt))["meta_info"]["cached_tokens"] == 0
    assert (await http.get("/flush_cache")).status_code == 405, "a page could send it"
    running = await running_request(http, router, monkeypatch)
    refused = await http.post("/flush_cache", json={})
    assert (refused.status_code, refused.text[:9]) == (400, "The cache")
    monkeypatch.undo()
    assert (await running).status_code == 200


async def test_a_request_is_ended_by_its_id(http, router, caplog, monkeypatch):
    """Its status is none that OpenAI's clients retry, as they retry 500."""
    running = await running_request(http, router, monkeypatch, rid="long")
    assert (await http.post("/abort_request", json={"rid": "long"})).status_code == 200
    ended = await asyncio.wait_for(running, 30)
    assert (ended.status_code, ended.json()["error"]["code"]) == (499, "request_aborted")
    assert "AbortedError" not in caplog.text
    refused = await http.post("/abort_request", json={"rid": ""})
    assert refused.json()["error"]["param"] == "rid"


async def test_a_request_is_ended_while_it_is_prepared(http, router, monkeypatch):
    """A grammar may wait for others to be compiled."""
    is_compiling = asyncio.Event()

    async def compile_slowly(*_):
        is_compiling.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(router.text, "compile", compile_slowly)
    before = router.metrics.num_refused
    body = {"text": PROMPT, "rid": "mine", "sampling_params": {**GREEDY, "regex": "a+"}}
    running = asyncio.create_task(http.post("/generate", json=body))
    await is_compiling.wait()
    await http.post("/abort_request", json={"rid": "mine"})
    ended = await asyncio.wait_for(running, 30)
    assert (ended.status_code, ended.json()["error"]["code"]) == (499, "request_aborted")
    assert router.metrics.num_refused == before + 1


async def test_an_operator_ends_all_requests(http, router, monkeypatch):
    changes = {"text": [PROMPT, PROMPT], "rid": ["any", "other"]}
    running = await running_request(http, router, monkeypatch, **changes)
    body = {"rid": "", "abort_all": True}
    assert (await http.post("/abort_request", json=body)).status_code == 200
    assert (await running).status_code == 499


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [
        ("sk-of-a-client", {"abort_all": True}, 401),
        ("sk-of-a-client", {"rid": "x"}, 200),
        ("token-of-operators", {"abort_all": True}, 200),
        ("unknown", {"rid": "x"}, 401),
    ],
)
async def test_only_the_operators_token_ends_the_requests_of_others(router, key, body, status):
    keys = ApiKeys([ApiKey("ann", "sk-of-a-client")])
    admin = alone(router)
    admin.access = AdminAccess("token-of-operators", keys)
    app = make_app(lambda: router, lambda: admin, lambda: keys)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        headers = {"authorization": f"Bearer {key}"}
        response = await http.post("/abort_request", json=body, headers=headers)
    assert response.status_code == status


async def test_a_batch_is_ended_by_its_id(http, router, monkeypatch):
    running = await running_request(http, router, monkeypatch, text=[PROMPT, PROMPT], rid="batch")
    assert (await http.post("/abort_request", json={"rid": "bat"})).status_code == 200
    await asyncio.sleep(0.05)
    assert not running.done()
    assert (await http.post("/abort_request", json={"rid": "batch"})).status_code == 200
    assert (await asyncio.wait_for(running, 30)).status_code != 200


async def test_a_key_ends_its_own_requests_alone(router, monkeypatch):
    keys = ApiKeys([ApiKey("ann", "sk-correct-horse"), ApiKey("bob", "sk-battery-staple")])
    transport = httpx.ASGITransport(make_app(lambda: router, lambda: alone(router), lambda: keys))
    ann, bob = (
        httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"authorization": f"Bearer {key}"}
        )
        for key in ("sk-correct-horse", "sk-battery-staple")
    )
    async with ann, bob:
        running = await running_request(ann, router, monkeypatch, rid="mine")
        assert (await bob.post("/abort_request", json={"rid": "mine"})).status_code == 200
        await asyncio.sleep(0.05)
        assert not running.done()
        assert (await ann.post("/abort_request", json={"rid": "mine"})).status_code == 200
        assert (await asyncio.wait_for(running, 30)).status_code != 200


async def test_orders_are_for_every_replica(router):
    orders = []

    async def abort(order):
        orders.append(order)

    async def flush_caches():
        orders.append("flush")
        return len(orders) == 2

    admin = SimpleNamespace(
        applications=None,
        orders=SimpleNamespace(abort=abort, flush_caches=flush_caches),
        access=AdminAccess(),
    )
    transport = httpx.ASGITransport(
        make_app(lambda: router, lambda: admin), client=("192.0.2.7", 5000)
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post("/abort_request", json={"rid": "x"})).status_code == 200
        assert (await http.post("/flush_cache", json={})).status_code == 200
        refused = await http.post("/flush_cache", json={})
    assert orders == [AbortOrder("x", Caller("192.0.2.7", is_stranger=True)), "flush", "flush"]
    assert refused.status_code == 400
    assert "of a replica is not flushed while its requests run or wait" in refused.text
