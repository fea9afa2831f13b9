# Modules: specdec.types.samples
"""Samples kept for training: answers that request and service allow, of one salt, in memory."""

import asyncio
from dataclasses import replace

import pytest

from cluster.replica.sample_buffer import SampleBuffer
from specdec.client.codec.inference import decode_request, encode_request
from specdec.sequences.sequence import EngineRequest
from specdec.types.errors import TargetFailedError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import GenerateRequest, ThinkingBudget
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.samples import SampleBatch, SampleOrder, ServedSample
from specdec.types.sampling.sampling_params import SamplingParams
from tests.cluster.replica_on_hash_target import MODEL, running_replica

PARAMS = SamplingParams()


def request(prompt=(1, 2, 3), resume=()):
    return EngineRequest(prompt, PARAMS, seed=0, resume_token_ids=resume)


def output(*token_ids, end=None, choice=0, verifier="coupled"):
    reason = None if end is None else FinishReason(end)
    return EngineOutput(
        "r", token_ids, "", reason, 3, 0, SpeculationStats(), choice=choice, verifier=verifier
    )


async def stream_of(outputs, error=None):
    for each in outputs:
        yield each
    if error is not None:
        raise error


async def record(buffer, *outputs, error=None, asked=None):
    """Record the outputs of a request; return those that are passed on."""
    stream = buffer.recording(asked or request(), 0.5, stream_of(outputs, error))
    return [each async for each in stream]


@pytest.mark.parametrize(
    ("max_tokens", "salt", "cache_salt", "allow_training", "is_accepted"),
    [
        (100, "", "", True, True),
        (100, "", "", False, False),
        (0, "", "", True, False),
        (100, "", "tenant", True, False),
        (100, "tenant", "tenant", True, True),
        (100, "tenant", "", True, False),
        (100, "tenant", "other", True, False),
    ],
)
def test_request_service_and_salt_have_to_allow_it(
    max_tokens, salt, cache_salt, allow_training, is_accepted
):
    buffer = SampleBuffer(max_tokens, salt, "r1")
    assert buffer.accepts(cache_salt, allow_training=allow_training) == is_accepted


async def test_the_mark_of_a_thinking_budget_is_no_text_of_the_target():
    """The text after it is a sample with the reasoning and the mark as prompt."""
    thinking = ThinkingBudget(2, (8, 9), bool)
    asked = replace(request(), thinking_budget=thinking)
    buffer = SampleBuffer(100, "", "r1")
    await record(buffer, output(4, 5, 8, 9), output(6, 7, end="stop"), asked=asked)
    parts = ServedSample((1, 2, 3, 4, 5), 3, 0.5), ServedSample((1, 2, 3, 4, 5, 8, 9, 6, 7), 7, 0.5)
    assert buffer.take(SampleOrder()).samples == parts
    await record(buffer, output(4, 5, 6), output(9, end="stop"), asked=asked)
    assert buffer.take(SampleOrder()).samples == (ServedSample((1, 2, 3, 4, 5, 6, 9), 3, 0.5),)


async def test_each_choice_is_a_sample_once_it_completes():
    buffer = SampleBuffer(100, "", "r1")
    outputs = [
        output(4, 5),
        output(7, choice=1),
        output(6, end="stop"),
        output(8, 9, end="length", choice=1),
    ]
    assert await record(buffer, *outputs) == outputs
    first, second = (
        ServedSample((1, 2, 3, 4, 5, 6), 3, 0.5),
        ServedSample((1, 2, 3, 7, 8, 9), 3, 0.5),
    )
    assert buffer.take(SampleOrder()) == SampleBatch("r1", (first, second), 0, 0)
    assert buffer.take(SampleOrder()) == SampleBatch("r1", (), 0, 0), "they are forgotten"


async def test_the_resumed_part_of_an_answer_is_the_clients():
    buffer = SampleBuffer(100, "", "r1")
    await record(buffer, output(6, 7, end="stop"), asked=request(resume=(4, 5)))
    assert buffer.take(SampleOrder()).samples == (ServedSample((1, 2, 3, 4, 5, 6, 7), 5, 0.5),)


async def test_incomplete_failed_lossy_and_short_answers_are_not_kept():
    buffer = SampleBuffer(100, "", "r1")
    await record(buffer, output(4, 5))
    with pytest.raises(TargetFailedError):
        await record(buffer, output(4, 5), error=TargetFailedError("lost"))
    await record(buffer, output(4, 5, end="stop", verifier="typical"))
    await record(buffer, output(4, end="stop"))
    stream = buffer.recording(request(), 0.5, stream_of([output(4), output(5, end="stop")]))
    await anext(stream)
    await stream.aclose()  # the client has disconnected
    assert buffer.take(SampleOrder()).samples == ()


async def test_the_oldest_samples_make_room():
    buffer = SampleBuffer(20, "", "r1")
    for last in range(5):
        await record(buffer, output(10, last, end="stop"), asked=request((last, 2, 3, 4)))
    await record(buffer, output(*range(30), end="stop"))  # larger than the buffer
    batch = buffer.take(SampleOrder(max_tokens=12))
    assert [each.token_ids[0] for each in batch.samples] == [2, 3]
    assert (batch.num_left_tokens, batch.num_dropped) == (6, 2)
    assert len(buffer.take(SampleOrder(max_tokens=1)).samples) == 1, "at least one"


async def test_a_replica_keeps_answers_over_grpc_and_http(tiny_model_dir, tmp_path):
    body = {"model": MODEL, "prompt": [10, 11, 12], "max_tokens": 4, "temperature": 0}
    async with running_replica(tiny_model_dir, tmp_path) as replica:
        router = replica.router
        router._samples = SampleBuffer(100, "", "r1")
        await asyncio.to_thread(router.text.load)
        for changes in ({}, {"allow_training": True}, {"allow_training": True, "cache_salt": "a"}):
            response = await replica.http.post("/v1/completions", json={**body, **changes})
            assert response.status_code == 200, response.text
        message = encode_request(
            GenerateRequest((10, 11), SamplingParams(max_tokens=4), allow_training=True)
        )
        generation = await router.generate(decode_request(message))
        answer = [token async for each in generation.outputs for token in each.token_ids]
        over_http, over_grpc = router.take_samples(SampleOrder()).samples
    assert over_http.token_ids == (10, 11, 12, *replica.target.continuation([10, 11, 12], 4))
    assert over_grpc == ServedSample((10, 11, *answer), 2, 1.0)
