"""Tests of the asyncio client against a scripted service in this process."""

import asyncio
from contextlib import aclosing, suppress

import grpc
import pytest

from specdec.client import AsyncClient, Client, ClientError, resumption
from specdec.types.sampling.sampling_params import SamplingParams
from tests.specdec.client.certificate import self_signed_certificate
from tests.specdec.client.fake_service import FakeService, running

KEY = "sk-correct-horse"


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(resumption, "RESUME_DELAYS_S", (0.0, 0.01, 0.02))
    with running(FakeService()) as service:
        yield service


@pytest.fixture
async def client(service):
    async with AsyncClient(service.address, timeout_s=10, api_key=KEY) as client:
        yield client


async def chunks_of(stream):
    return [chunk async for chunk in stream]


async def test_every_call_matches_the_blocking_client(client, service):
    params = SamplingParams(temperature=0.5, seed=3)
    with Client(service.address, timeout_s=10, api_key=KEY) as blocking:
        expected = [
            blocking.generate("Why?", params, priority=2, cache_salt="a"),
            list(blocking.generate_stream("Why?", params, stream_interval=4)),
            blocking.tokenize("ab"),
            blocking.detokenize([1, 2]),
            blocking.model_info("tiny"),
        ]
    expected_requests, service.requests = service.requests, []
    assert expected == [
        await client.generate("Why?", params, priority=2, cache_salt="a"),
        await chunks_of(client.generate_stream("Why?", params, stream_interval=4)),
        await client.tokenize("ab"),
        await client.detokenize([1, 2]),
        await client.model_info("tiny"),
    ]
    assert service.requests == expected_requests
    assert service.metadata["authorization"] == f"Bearer {KEY}"


async def test_many_calls_at_once(client):
    generated = await asyncio.gather(*(client.generate("Why?") for _ in range(20)))
    assert {each.text for each in generated} == {"Blue sky"}


@pytest.mark.parametrize("num_errors", [1, 3])
async def test_a_broken_stream_is_resumed_after_the_received_tokens(client, service, num_errors):
    service.error = (grpc.StatusCode.UNAVAILABLE, "the replica is lost")
    service.num_chunks_before_error, service.num_errors = 1, num_errors
    chunks = await chunks_of(client.generate_stream("Why?"))
    assert [chunk.token_ids for chunk in chunks] == [(5,), (6, 7)]
    assert len(service.requests) == 1 + num_errors
    assert list(service.requests[-1].resume_token_ids) == [5]


@pytest.mark.parametrize(("resume", "num_calls"), [(True, 2), (False, 1)])
async def test_the_number_of_attempts_is_limited(client, service, monkeypatch, resume, num_calls):
    monkeypatch.setattr(resumption, "RESUME_DELAYS_S", (0.0,))
    service.error = (grpc.StatusCode.UNAVAILABLE, "the replica is lost")
    service.num_chunks_before_error = 1
    with pytest.raises(ClientError, match="the replica is lost"):
        await chunks_of(client.generate_stream("Why?", resume=resume))
    assert len(service.requests) == num_calls


@pytest.mark.parametrize(("code", "num_calls"), [("UNAVAILABLE", 3), ("INTERNAL", 1)])
async def test_a_call_is_retried_only_when_the_service_is_unavailable(
    client, service, code, num_calls
):
    service.error, service.num_errors = (grpc.StatusCode[code], "no"), 2
    with suppress(ClientError):
        assert (await client.generate("Why?")).text == "Blue sky"
    assert len(service.requests) == num_calls


async def test_an_expired_deadline_raises_and_cancels_the_call(service):
    service.hangs = True
    async with AsyncClient(service.address, timeout_s=0.2) as client:
        while not service.requests:  # a thread of the service may be late
            with pytest.raises(ClientError, match=r"within 0\.2 s") as caught:
                await chunks_of(client.generate_stream("Why?"))
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await asyncio.to_thread(service.ended.wait, 30), (
        "the service did not observe the cancellation"
    )


async def test_closing_a_stream_cancels_the_call(client, service):
    service.hangs, service.num_chunks_before_error = True, 1
    async with aclosing(client.generate_stream("Why?")) as chunks:
        async for chunk in chunks:
            assert chunk.text == "Blue"
            break
    assert await asyncio.to_thread(service.ended.wait, 5)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_cancelling_a_task_cancels_its_call(client, service, is_stream):
    service.hangs = True
    call = chunks_of(client.generate_stream("Why?")) if is_stream else client.generate("Why?")
    task = asyncio.create_task(call)
    assert await asyncio.to_thread(service.is_hanging.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(service.ended.wait, 5)


async def test_tls(tmp_path):
    ca_file = tmp_path / "ca.pem"
    key, certificate = self_signed_certificate()
    ca_file.write_bytes(certificate)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    with running(FakeService(), credentials) as service:
        async with AsyncClient(service.address, tls_ca_file=ca_file) as client:
            assert (await client.model_info()).model == "tiny"


async def test_tls_with_a_certificate_of_another_name(tmp_path):
    ca_file = tmp_path / "ca.pem"
    key, certificate = self_signed_certificate("llm.example.com")
    ca_file.write_bytes(certificate)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    named = {"tls_ca_file": ca_file, "tls_server_name": "llm.example.com"}
    with running(FakeService(), credentials) as service:
        async with AsyncClient(service.address, **named) as client:
            assert (await client.model_info()).model


async def test_closing_a_client_ends_its_calls_with_an_error(service):
    service.hangs = True
    client = AsyncClient(service.address, timeout_s=10)
    task = asyncio.create_task(client.generate("Why?"))
    assert await asyncio.to_thread(service.is_hanging.wait, 5)
    await client.close()
    with pytest.raises(ClientError, match="the client was closed"):
        await task
