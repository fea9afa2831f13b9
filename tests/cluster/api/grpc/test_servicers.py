"""API keys of InferenceService, on a replica whose target needs no model."""

import asyncio
import logging
import threading
from types import SimpleNamespace

import pytest
from grpc import StatusCode

from cluster.api.base.authentication import ApiKey, ApiKeys
from cluster.api.grpc import servicers
from cluster.api.grpc.servicers import AdminServicer, expose_rpcs
from cluster.observability.logs import JsonFormatter
from protos.specdec.v1 import admin_pb2
from protos.specdec.v1 import inference_pb2 as pb
from specdec.types.errors import OverloadedError
from specdec.types.request import Caller
from tests.cluster.admin_service import operator_service
from tests.cluster.replica_on_hash_target import running_replica

KEY, OTHER = "sk-correct-horse", "sk-battery-staple"
SAMPLING = pb.SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
REQUESTS = {
    "Generate": pb.GenerateRequest(text="Ask", sampling=SAMPLING),
    "GenerateStream": pb.GenerateRequest(text="Ask", sampling=SAMPLING),
    "Tokenize": pb.TokenizeRequest(text="Ask"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[5]),
    "GetModelInfo": pb.GetModelInfoRequest(),
}


@pytest.fixture
async def replica(tiny_model_dir, tmp_path):
    async with running_replica(tiny_model_dir, tmp_path) as replica:
        yield replica


async def call(replica, method, key=None, peer="ipv4:192.0.2.1:5000", **fields):
    """Call a method; return the status code and the trailing metadata."""
    status = SimpleNamespace(code=StatusCode.OK, trailing=[])
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    context = SimpleNamespace(
        invocation_metadata=lambda: metadata,
        peer=lambda: peer,
        set_code=lambda code: setattr(status, "code", code),
        set_details=lambda details: None,
        set_trailing_metadata=status.trailing.extend,
    )
    request = type(REQUESTS[method])(**fields)
    request.MergeFrom(REQUESTS[method])
    answer = getattr(replica.servicer, method)(request, context)
    if method == "GenerateStream":
        [each async for each in answer]
    else:
        await answer
    return status.code, dict(status.trailing)


async def test_an_unknown_number_of_a_method_is_refused_by_the_loaded_ones(replica):
    details = []
    context = SimpleNamespace(
        invocation_metadata=lambda: (),
        peer=lambda: "ipv4:192.0.2.1:5000",
        set_code=lambda code: None,
        set_details=details.append,
        set_trailing_metadata=lambda metadata: None,
    )
    request = pb.GenerateRequest(text="Ask", speculation=pb.SpeculationOptions(method=99))
    await replica.servicer.Generate(request, context)
    assert details == ["speculation.method is '99'; it must be what is loaded: ngram"]


@pytest.mark.parametrize("method", REQUESTS)
async def test_every_method_requires_a_key_if_keys_are_configured(replica, method):
    assert await call(replica, method) == (StatusCode.OK, {})
    replica.servicer.keys = ApiKeys([ApiKey("ann", KEY)])
    assert await call(replica, method) == (StatusCode.UNAUTHENTICATED, {})
    assert await call(replica, method, "sk-wrong-key") == (StatusCode.UNAUTHENTICATED, {})
    assert await call(replica, method, KEY) == (StatusCode.OK, {})


@pytest.mark.parametrize("method", REQUESTS)
async def test_no_log_line_has_a_prompt_an_output_or_a_key(replica, method, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    replica.servicer.keys = ApiKeys([ApiKey("ann", KEY)])
    prompt, wrong = "Wombats dig at dusk", "sk-wrong-wombat"
    fields = {"text": prompt} if "text" in REQUESTS[method].DESCRIPTOR.fields_by_name else {}
    changes = {"Generate": {"priority": -9999}, "Detokenize": {"token_ids": [10**6]}}
    assert await call(replica, method, KEY, **fields) == (StatusCode.OK, {})
    await call(replica, method, wrong, **fields)
    await call(replica, method, KEY, **{**fields, **changes.get(method, {})})
    output = "".join(each.text for each in await replica.generate())
    assert output
    logged = "\n".join(JsonFormatter().format(each) for each in caplog.records)
    assert method != "Generate" or "request ended" in logged, "something is logged"
    assert not [each for each in (prompt, output, KEY, wrong) if each in logged]


@pytest.mark.parametrize("method", REQUESTS)
async def test_slots_of_a_key_are_released(replica, method):
    replica.servicer.keys = ApiKeys([ApiKey("ann", KEY, max_concurrent_requests=1)])
    for _ in range(2):
        assert await call(replica, method, KEY) == (StatusCode.OK, {})


async def test_a_key_over_its_rate_gets_a_retry_delay(replica):
    replica.servicer.keys = ApiKeys([ApiKey("ann", KEY, requests_per_s=0.1)])
    assert await call(replica, "Generate", KEY) == (StatusCode.OK, {})
    refused = StatusCode.RESOURCE_EXHAUSTED, {"retry-after-s": "10"}
    assert await call(replica, "Generate", KEY) == refused
    assert await call(replica, "GetModelInfo", KEY) == (StatusCode.OK, {}), "takes no slot"


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_the_priority_is_limited(replica, method):
    refused = StatusCode.INVALID_ARGUMENT, {}
    assert await call(replica, method, priority=-10) == (StatusCode.OK, {})
    assert await call(replica, method, priority=-1000) == refused
    replica.servicer.keys = ApiKeys([ApiKey("ann", KEY, min_priority=-1000), ApiKey("bob", OTHER)])
    assert await call(replica, method, KEY, priority=-1000) == (StatusCode.OK, {})
    assert await call(replica, method, OTHER, priority=-1) == refused


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_grammars_are_compiled_in_the_name_of_the_client(replica, method, monkeypatch):
    callers = []

    async def compile(spec, caller, num_sequences):
        callers.append(caller)
        raise OverloadedError("enough")

    monkeypatch.setattr(replica.router.text, "compile", compile)
    structured = pb.StructuredOutput(regex="a+")
    sampling = pb.SamplingParams(max_tokens=2, structured_output=structured)
    refused = StatusCode.RESOURCE_EXHAUSTED
    peers = ("ipv4:192.0.2.7:5000", "ipv6:%5B2001:db8::7%5D:5000")
    for peer in peers:
        without_key = call(replica, method, peer=peer, sampling=sampling)
        assert (await asyncio.create_task(without_key))[0] == refused
    replica.servicer.keys = ApiKeys([ApiKey("ann", KEY), ApiKey("bob", KEY + "2")])
    for key in (KEY + "2", KEY):
        assert (await asyncio.create_task(call(replica, method, key, sampling=sampling)))[
            0
        ] == refused
    unknown = await asyncio.create_task(call(replica, method, sampling=sampling))
    assert unknown[0] == StatusCode.UNAUTHENTICATED
    strangers = [Caller(each, is_stranger=True) for each in ("192.0.2.7", "2001:db8::/64")]
    expected = [*strangers, Caller("bob"), Caller("ann")]
    assert callers == expected, "nothing is compiled without a key where there are keys"


@pytest.mark.parametrize(
    ("most", "sampling", "is_long"),
    [(2, {}, False), (1, {}, True), (2, {"logprobs": 1}, True)],
)
async def test_long_answers_are_encoded_on_a_thread(replica, monkeypatch, most, sampling, is_long):
    threads, encode = [], servicers.encode_completion

    def recorded(*arguments):
        threads.append(threading.current_thread())
        return encode(*arguments)

    monkeypatch.setattr(servicers, "encode_completion", recorded)
    monkeypatch.setattr(servicers, "_MANY_TOKENS", most)
    answered = await call(replica, "Generate", sampling=pb.SamplingParams(**sampling))
    assert answered == (StatusCode.OK, {})
    assert [each is not threading.current_thread() for each in threads] == [is_long]


async def test_a_deployment_has_the_rpcs_of_both_servicers(replica):
    deployment = SimpleNamespace()
    expose_rpcs(replica.servicer, deployment)
    expose_rpcs(AdminServicer(operator_service(replica.link)), deployment)
    services = (
        *pb.DESCRIPTOR.services_by_name.values(),
        *admin_pb2.DESCRIPTOR.services_by_name.values(),
    )
    names = {method.name for service in services for method in service.methods}
    assert vars(deployment).keys() == names | {"Check"}
