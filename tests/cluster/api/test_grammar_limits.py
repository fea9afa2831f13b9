# Modules: cluster.api.ingress
"""The limits of grammar compilations by client, over gRPC and HTTP on real servers."""

import asyncio
import threading

import grpc
import httpx
import pytest

import cluster.replica.preprocessor as preprocessor
import specdec.text.grammar.compiler as compiler_module
from cluster.api.base.authentication import ApiKey
from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub
from specdec.text.grammar.compiler import MAX_WAITING, MAX_WAITING_OF_STRANGER
from tests.cluster.ingress import running_ingress

KEY = "sk-correct-horse"
TIMEOUT_S = 60.0
REFUSED = ("RESOURCE_EXHAUSTED", "429")
COMPILED = ("FAILED_PRECONDITION", "400")
"""How a compiled request ends here: the target has no model and does not know the grammar."""


@pytest.fixture
def gate(monkeypatch):
    """Hold each compilation, as a heavy grammar does; opened at the end."""
    gate, compile_now = threading.Event(), compiler_module.first_matcher

    def first_matcher(tokenizer, spec):
        assert gate.wait(TIMEOUT_S)
        return compile_now(tokenizer, spec)

    monkeypatch.setattr(compiler_module, "first_matcher", first_matcher)
    monkeypatch.setattr(preprocessor, "COMPILE_TIMEOUT_S", TIMEOUT_S)
    yield gate
    gate.set()


async def over_grpc(served, key, regex):
    """Return the status, its text and the retry hint of one request."""
    structured = pb.StructuredOutput(regex=regex)
    sampling = pb.SamplingParams(max_tokens=2, structured_output=structured)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        call = InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(text="Ask", sampling=sampling), metadata=metadata, timeout=TIMEOUT_S
        )
        code, trailing = await call.code(), await call.trailing_metadata()
        return code.name, await call.details(), dict(trailing or ()).get("retry-after-s")


async def over_http(served, key, regex):
    body = {"prompt": "Ask", "max_tokens": 2, "structured_outputs": {"regex": regex}}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=served.http_url, timeout=TIMEOUT_S) as http:
        response = await http.post("/v1/completions", json=body, headers=headers)
    error = response.json().get("error", {})
    return str(response.status_code), error.get("message"), response.headers.get("retry-after")


DOORS = {"gRPC": over_grpc, "HTTP": over_http}


@pytest.mark.parametrize(
    ("door", "key", "limit"),
    [
        ("gRPC", "", MAX_WAITING_OF_STRANGER),
        ("HTTP", KEY, MAX_WAITING),
        pytest.param("gRPC", KEY, MAX_WAITING, marks=pytest.mark.slow),
        pytest.param("HTTP", "", MAX_WAITING_OF_STRANGER, marks=pytest.mark.slow),
    ],
)
async def test_one_grammar_above_the_limit_is_refused(
    tiny_model_dir, tmp_path, gate, door, key, limit
):
    """A client without a key has a share of 8, whichever interface it uses; with a key it is 16."""
    keys = [ApiKey("ann", KEY)] if key else []
    async with running_ingress(tiny_model_dir, tmp_path, keys) as served:
        compiling = [
            asyncio.create_task([*DOORS.values()][number % 2](served, key, f"a{{{number + 1}}}"))
            for number in range(limit)
        ]
        queued = served.replica.router.text._grammars._cache
        while len(queued) < limit:
            await asyncio.sleep(0.01)
        code, text, retry_after_s = await DOORS[door](served, key, "b+")
        assert code in REFUSED
        assert "structured_output" in text
        assert f"{limit} grammars of this client" in text
        assert f"limit {limit}" in text
        assert float(retry_after_s) > 0
        gate.set()
        assert {code for code, _, _ in await asyncio.gather(*compiling)} <= {*COMPILED}
        assert (await DOORS[door](served, key, "b+"))[0] in COMPILED, "the share is free again"
