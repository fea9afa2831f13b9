# Modules: cluster.config.receipts, cluster.replica.auditor
"""Receipts and audits of a Router's answers, on the tiny model in this process."""

import asyncio
import threading
from array import array
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
import pytest_asyncio

from cluster.api.base.authentication import ApiKeys
from cluster.api.grpc.servicers import InferenceServicer
from cluster.api.http_app import make_app
from cluster.config.serve_config import ServeConfig
from cluster.replica import receipts
from cluster.replica.auditor import MAX_WAITING
from cluster.replica.replica_router import ReplicaRouter
from cluster.workers.ray.resources import ReplicaMemory
from specdec.client.codec.inference import encode_request
from specdec.client.codec.outputs import decode_completion
from specdec.engine.models.model_resolution import ModelDirectories
from specdec.engine.receipts.issuing import Answer
from specdec.engine.receipts.report import Outcome
from specdec.engine.receipts.signatures import SigningKey, is_signed
from specdec.llm.receipts.verification import verify_receipt
from specdec.sequences.sequence import EngineRequest
from specdec.types.deadline import Deadline
from specdec.types.errors import (
    DeadlineExceededError,
    InvalidValueError,
    NotReadyError,
    UnsupportedModelError,
)
from specdec.types.reports.receipts import Receipt, Statement
from specdec.types.request import GenerateRequest, ThinkingBudget
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions
from tests.cluster.api.openai.conftest import alone, events
from tests.cluster.serving import serve
from tests.specdec.engines import engine_config, local_engine
from tests.specdec.receipts import SteppedReplayer
from tests.waiting import eventually

SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def routers(tiny_model_dir, tmp_path_factory):
    """Routers with a key, and with an audit of all answers; both draft."""
    path = tmp_path_factory.mktemp("key") / "key.pem"
    SigningKey.generate().write(path)
    found, threads = {}, []
    for name, settings in (("key", {"receipt_key_file": path}), ("audit", {"audit_share": 1.0})):
        config = ServeConfig(model=str(tiny_model_dir), max_model_len=160, device="cpu", **settings)
        router = ReplicaRouter(config, ModelDirectories(tiny_model_dir, None), ReplicaMemory(2**32))
        threads.append(serve(router, local_engine(tiny_model_dir, engine_config(3))))
        router.text.load()
        found[name] = router
    yield found
    for router, thread in zip(found.values(), threads, strict=True):
        await router.auditor.close()
        await thread.close()
        router.text.close()


async def outputs_of(router, **fields):
    call = GenerateRequest((5, 6, 7, 8), fields.pop("params", SAMPLED), **fields)
    generation = await router.generate(call)
    return [output async for output in generation.outputs]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_last_output_has_the_requested_receipt(routers, tiny_model_dir):
    *others, last = await outputs_of(routers["key"], receipt=True, request_id="mine")
    assert all(each.receipt is None for each in others)
    statement = Statement.from_text(last.receipt.statement)
    assert statement.request_id == "mine"
    assert [each.num_tokens for each in statement.choices] == [12, 12]
    replayer = SteppedReplayer(tiny_model_dir, local_engine(tiny_model_dir, engine_config(0)))
    assert verify_receipt(last.receipt, replayer).outcome is Outcome.EQUAL
    assert routers["key"].metrics.counts.num_receipts == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_no_other_request_is_followed(routers):
    assert (await outputs_of(routers["key"]))[-1].receipt is None
    assert not routers["key"].metrics.audits.total()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_receipt_that_cannot_be_issued_is_rejected(routers):
    rejection = SpeculationOptions(verifier="rejection")
    with pytest.raises(InvalidValueError, match="the service has no receipt_key_file"):
        await outputs_of(routers["audit"], receipt=True)
    with pytest.raises(InvalidValueError, match=r"receipt .* verifier rejection"):
        await outputs_of(
            routers["key"], receipt=True, params=replace(SAMPLED, speculation=rejection)
        )
    greedy = replace(SAMPLED, temperature=0.0, speculation=rejection)
    assert (await outputs_of(routers["key"], receipt=True, params=greedy))[-1].receipt


class Slow:
    """A description of a model that is made when the test sets the event."""

    def __init__(self, monkeypatch, describe):
        self.may_end = threading.Event()
        self._describe = describe
        monkeypatch.setattr(receipts, "receipt_model", self)

    def __call__(self, *arguments):
        assert self.may_end.wait(20)
        return self._describe(*arguments)


def receipts_of(router, directory):
    """Return further receipts of a Router's settings, which read the weights again."""
    config, model = router.config, router._model
    describe = partial(receipts.read_model, config, directory, model, 160)
    return receipts.Receipts(
        config, model.sampling_defaults, router.metrics, router.auditor, describe
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_does_not_end_the_reading_of_the_weights(
    routers, tiny_model_dir, monkeypatch
):
    slow = Slow(monkeypatch, receipts.receipt_model)
    own, outputs = (
        receipts_of(routers["key"], tiny_model_dir),
        await outputs_of(routers["key"], params=ALONE),
    )
    waiting = asyncio.create_task(own._issue(answer_of(outputs)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    slow.may_end.set()
    assert is_signed(await own._issue(answer_of(outputs)))


@pytest.mark.asyncio(loop_scope="module")
async def test_the_time_limit_of_a_request_includes_the_reading_of_the_weights(
    routers, tiny_model_dir, monkeypatch
):
    async def repeated(outputs):
        for each in outputs:
            yield each

    made = await outputs_of(routers["key"], params=ALONE)
    slow = Slow(monkeypatch, receipts.receipt_model)
    own = receipts_of(routers["key"], tiny_model_dir)
    request = EngineRequest((5, 6, 7, 8), ALONE, seed=5, receipt=True)
    outputs = own.follow(request, repeated(made), Deadline.after(0.0), is_audited=False)
    with pytest.raises(DeadlineExceededError):
        assert [each async for each in outputs]
    slow.may_end.set()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("error", "shown"),
    [(OSError("/secret/path"), "its files cannot be read"), (UnsupportedModelError("no"), "no")],
    ids=["file", "model"],
)
async def test_a_model_without_a_description_has_no_receipts(
    routers, tiny_model_dir, monkeypatch, caplog, error, shown
):
    def fail(*_arguments):
        raise error

    slow = Slow(monkeypatch, fail)
    slow.may_end.set()
    own = receipts_of(routers["key"], tiny_model_dir)
    with suppress(type(error)):
        await asyncio.wrap_future(own._model)
    with pytest.raises(InvalidValueError, match=f"receipt .* false for this model: {shown}"):
        own.check(EngineRequest((5,), ALONE, seed=5, receipt=True))
    assert "the files of the model cannot be read" in caplog.text


async def audited(router, count):
    """Wait for the results of this many audits in all."""
    await eventually(lambda: sum(router.metrics.audits.values()) >= count)
    return router.metrics.counts.audits


PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
BODY = {"prompt": PROMPTS, "max_tokens": 6, "seed": 3, "receipt": True}


@pytest_asyncio.fixture(loop_scope="module")
async def http(routers):
    router = routers["key"]
    app = make_app(lambda: router, lambda: alone(router), ApiKeys)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
async def test_over_http_each_prompt_has_a_receipt(http):
    answer = (await http.post("/v1/completions", json={**BODY, "return_token_ids": True})).json()
    receipts = [Receipt.from_mapping(each) for each in answer["receipts"]]
    assert [list(each.opening.prompt_token_ids) for each in receipts] == PROMPTS
    outputs = [each["token_ids"] for each in answer["choices"]]
    assert [list(each.opening.outputs[0]) for each in receipts] == outputs
    assert {Statement.from_text(each.statement).seed for each in receipts} == {3}
    assert "receipts" not in (await http.post("/v1/completions", json=BODY | {"receipt": 0})).text


@pytest.mark.asyncio(loop_scope="module")
async def test_in_a_stream_the_last_chunk_has_the_receipt(http):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "receipt": True}
    *others, last = events(await http.post("/v1/chat/completions", json={**body, "stream": True}))
    assert not any("receipts" in each for each in others)
    [receipt] = last["receipts"]
    assert is_signed(Receipt.from_mapping(receipt))
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    assert is_signed(Receipt.from_mapping(whole["receipts"][0]))
    budget = {**body, "thinking_token_budget": 3}
    assert (await http.post("/v1/chat/completions", json=budget)).status_code == 400


@pytest.mark.asyncio(loop_scope="module")
async def test_over_grpc_the_response_has_the_receipt(routers):
    servicer = InferenceServicer(routers["key"], ApiKeys())
    params = replace(SAMPLED, seed=3)
    message = encode_request(GenerateRequest((5, 6, 7, 8), params, receipt=True))
    context = SimpleNamespace(invocation_metadata=tuple, peer=lambda: "ipv4:192.0.2.1:5000")
    answer = decode_completion(await servicer.Generate(message, context))
    assert is_signed(answer.receipt)
    assert answer.receipt.opening.outputs == tuple(each.token_ids for each in answer.choices)


ALONE = replace(SAMPLED, n=1, seed=5)


def answer_of(outputs, changed=None):
    """Return an answer as the Router records it. changed: a token in place of number 4."""
    answer = Answer(EngineRequest((5, 6, 7, 8), ALONE, seed=5, request_id="mine"))
    for output in outputs:
        answer.add(output)
    if changed is not None:
        answer.outputs[0][4] = changed
    return answer


@pytest.mark.asyncio(loop_scope="module")
async def test_answers_are_audited(routers, caplog):
    router = routers["audit"]
    await outputs_of(router)
    assert (await audited(router, 1))["equal"] == 1
    assert router.metrics.counts.num_audited_tokens == 24
    outputs = await outputs_of(router, params=ALONE)
    assert (await audited(router, 2))["equal"] == 2
    router.auditor.add(answer_of(outputs, changed=300))
    assert (await audited(router, 3))["impossible"] == 1
    assert "audit of request mine: choice 0, position 4, margin" in caplog.text
    assert "token" not in caplog.text


@pytest.mark.asyncio(loop_scope="module")
async def test_an_audit_omits_the_mark_of_a_thinking_budget(routers):
    """The reasoning before it is audited, and the answer after it."""
    router, mark = routers["audit"], (300, 301, 302)
    before, audits = router.metrics.counts.num_audited_tokens, router.metrics.audits.copy()
    params = replace(ALONE, max_tokens=20)
    call = GenerateRequest((5, 6, 7, 8), params, thinking_budget=ThinkingBudget(6, mark, bool))
    outputs = [output async for output in (await router.generate(call)).outputs]
    assert tuple(token for each in outputs for token in each.token_ids)[6:9] == mark
    found = await audited(router, audits.total() + 2)
    assert found["impossible"] == audits["impossible"]
    assert router.metrics.counts.num_audited_tokens - before == 6 + 11


class Interrupted:
    """Engine in which another request arrives when a replay begins, and runs on."""

    num_sequences = 0
    was_left = False

    async def generate(self, _request):
        self.num_sequences = 2
        try:
            await asyncio.sleep(60)
            yield
        finally:
            self.num_sequences, self.was_left = 1, True


@pytest.mark.asyncio(loop_scope="module")
async def test_an_audit_gives_way_to_requests(routers, monkeypatch):
    router, engine = routers["audit"], Interrupted()
    before = router.metrics.audits.total()
    outputs = await outputs_of(router, params=ALONE)
    await audited(router, before + 1)
    with monkeypatch.context() as patch:
        patch.setattr(router.auditor, "_get_client", lambda: engine)
        router.auditor.add(answer_of(outputs))
        await eventually(lambda: engine.was_left)
        assert router.metrics.audits.total() == before + 1, "the other request still runs"
    await audited(router, before + 2)


def raise_error(error):
    raise error


@pytest.mark.asyncio(loop_scope="module")
async def test_audits_that_cannot_run_are_counted_and_logged(routers, monkeypatch, caplog):
    router = routers["audit"]
    for _ in range(MAX_WAITING + 2):
        router.auditor.add(Answer(EngineRequest((5,), ALONE, seed=5)))
    assert router.metrics.audits["dropped"] == 2
    await router.auditor.close()
    assert router.metrics.audits["dropped"] == 2 + MAX_WAITING
    broken = answer_of(())
    broken.outputs[0] = array("i", [10**6, 5])  # no token of the model
    with monkeypatch.context() as patch:
        bug = KeyError("bug")  # the requests of an engine that fails share their error
        for error, outcome in ((NotReadyError("it stops"), "dropped"), (bug, "failed")):
            patch.setattr(router.auditor, "_get_client", partial(raise_error, error))
            before = router.metrics.audits.copy()
            for _ in range(2):
                router.auditor.add(broken)
            assert (await audited(router, before.total() + 2))[outcome] == before[outcome] + 2
    assert not hasattr(bug, "__notes__")
    before = router.metrics.audits.copy()
    router.auditor.add(broken)
    assert (await audited(router, before.total() + 1))["failed"] == before["failed"] + 1
    of_bug, _, of_token = (each.message for each in caplog.records)
    check = "audit of request mine failed: replay of choice 0, 2 tokens: "
    assert of_bug.startswith(f"{check}KeyError in raise_error (test_receipts.py:")
    assert of_token.startswith(f"{check}InvalidValueError of ")
    assert "bug" not in caplog.text
    assert "1000000" not in caplog.text


@pytest.mark.asyncio(loop_scope="module")
async def test_an_audit_that_is_cut_by_the_end_is_counted(routers, monkeypatch):
    router, engine = routers["audit"], Interrupted()
    before = router.metrics.audits["dropped"]
    monkeypatch.setattr(router.auditor, "_get_client", lambda: engine)
    router.auditor.add(answer_of(await outputs_of(routers["key"], params=ALONE)))
    while not engine.num_sequences:
        await asyncio.sleep(0)
    await router.auditor.close()
    assert (engine.was_left, router.metrics.audits["dropped"]) == (True, before + 1)


@pytest.mark.parametrize("settings", [{"audit_share": 1.5}, {"receipt_key_file": __file__}])
def test_settings_are_checked_at_the_start(tiny_model_dir, settings):
    values = {"model": str(tiny_model_dir), "device": "cpu", **settings}
    with pytest.raises(InvalidValueError, match=next(iter(settings))):
        ServeConfig.from_mapping(values)
