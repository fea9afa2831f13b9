"""Tests of stream resumption against a service that breaks streams on purpose."""

import time

import grpc
import pytest

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import Client, ClientError, resumption
from specdec.client.resumption import Resumption
from specdec.types.responses import FinishReason, StreamChunk
from specdec.types.sampling.sampling_params import SamplingParams
from tests.specdec.client.fake_service import CHUNKS_OF_TWO_CHOICES, FakeService, running


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(resumption, "RESUME_DELAYS_S", (0.0, 0.01, 0.02))
    with running(FakeService()) as service:
        service.error = (grpc.StatusCode.UNAVAILABLE, "the replica is lost")
        service.num_chunks_before_error = 1
        yield service


@pytest.fixture
def client(service):
    with Client(service.address, timeout_s=10) as client:
        yield client


@pytest.mark.parametrize("num_errors", [1, 3])
def test_a_broken_stream_is_resumed_after_the_received_tokens(client, service, num_errors):
    service.num_errors = num_errors
    chunks = list(client.generate_stream("Why?", SamplingParams(temperature=0.5), priority=3))
    assert [chunk.token_ids for chunk in chunks] == [(5,), (6, 7)]
    first, *others = service.requests
    assert not first.sampling.HasField("seed")
    assert len(others) == num_errors
    for again in others:
        assert (again.sampling.seed, list(again.resume_token_ids)) == (42, [5])
        assert (again.text, again.request_id, again.priority) == ("Why?", "r1", 3)
        assert again.sampling.temperature == 0.5


def test_the_number_of_attempts_is_limited(client, service, monkeypatch):
    monkeypatch.setattr(resumption, "RESUME_DELAYS_S", (0.0,))
    stream = client.generate_stream("Why?")
    assert next(stream).text == "Blue"
    with pytest.raises(ClientError, match="the replica is lost"):
        next(stream)
    assert len(service.requests) == 2


def test_each_chunk_renews_the_attempts(monkeypatch):
    monkeypatch.setattr(resumption, "RESUME_DELAYS_S", (0.0,))
    resumed = Resumption(pb.GenerateRequest(), None, time.monotonic)
    lost = ClientError(grpc.StatusCode.UNAVAILABLE, "the replica is lost")
    for _ in range(3):
        resumed.record(StreamChunk("r1", "Blue", (5,), None, 42, None))
        assert resumed.delay_s(lost) == 0.0
    with pytest.raises(ClientError, match="the replica is lost"):
        resumed.delay_s(lost)


def test_a_deadline_after_a_chunk_names_no_failure_before_it():
    resumed = Resumption(pb.GenerateRequest(), 10.0)
    resumed.delay_s(ClientError(grpc.StatusCode.UNAVAILABLE, "the replica is lost"))
    resumed.record(StreamChunk("r1", "Blue", (5,), None, 42, None))
    with pytest.raises(ClientError, match=r"^late$"):
        resumed.delay_s(ClientError(grpc.StatusCode.DEADLINE_EXCEEDED, "late"))


@pytest.mark.parametrize("is_resumable", [True, False])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_stream_is_complete_once_all_choices_have_ended(num_choices, is_resumable):
    request = pb.GenerateRequest(sampling=pb.SamplingParams(n=num_choices))
    attempts = Resumption(request, None, is_resumable=is_resumable)
    for choice in range(num_choices):
        attempts.record(StreamChunk("r1", "Blue", (5,), None, 42, None, choice))
        assert not attempts.is_complete
        attempts.record(StreamChunk("r1", "", (), FinishReason.STOP, 42, None, choice))
    assert attempts.is_complete


def test_an_error_after_the_end_of_all_choices_does_not_matter(client, service):
    service.chunks = (*CHUNKS_OF_TWO_CHOICES, CHUNKS_OF_TWO_CHOICES[0])
    service.num_chunks_before_error = 3
    chunks = list(client.generate_stream("Why?", SamplingParams(n=2)))
    assert len(chunks) == 3


def test_resume_token_ids_of_the_caller_are_sent_unchanged(client, service):
    service.num_errors = 0
    given = [1, 2]
    service.num_chunks_before_error = 2
    list(client.generate_stream("Why?", SamplingParams(seed=42), resume_token_ids=given))
    assert list(service.requests[0].resume_token_ids) == given
    assert given == [1, 2]


def test_a_resumed_stream_does_not_request_prompt_logprobs_again(client, service):
    service.num_errors = 1
    list(client.generate_stream("Why?", SamplingParams(prompt_logprobs=3, logprobs=2)))
    first, again = service.requests
    assert first.sampling.prompt_logprobs == 3
    assert not again.sampling.HasField("prompt_logprobs")
    assert again.sampling.logprobs == 2


@pytest.mark.parametrize(
    ("num_chunks", "code"),
    [(0, grpc.StatusCode.RESOURCE_EXHAUSTED), (1, grpc.StatusCode.INTERNAL)],
    ids=["before the first chunk", "another error"],
)
def test_an_error_that_cannot_be_resumed_is_raised_at_once(client, service, num_chunks, code):
    service.num_chunks_before_error, service.error = num_chunks, (code, "no")
    with pytest.raises(ClientError) as caught:
        list(client.generate_stream("Why?"))
    assert caught.value.code is code
    assert len(service.requests) == 1


def test_all_attempts_share_one_time_limit(service, monkeypatch):
    monkeypatch.setattr(resumption, "RESUME_DELAYS_S", (60.0,))
    began_at = time.monotonic()
    with Client(service.address, timeout_s=0.3) as client, pytest.raises(ClientError):
        list(client.generate_stream("Why?"))
    assert time.monotonic() - began_at < 30
