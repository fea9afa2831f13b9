# Modules: cluster.serve.router_factory
"""Tests of requests through client, ingress, Router and ranks."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import grpc
import httpx
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from transformers import LlamaForCausalLM

from specdec.client import Client, ClientError
from specdec.types.request import ChatMessage
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions

pytestmark = pytest.mark.e2e

NUM_TOKENS = 24
OFF = SpeculationOptions(enabled=False)
NGRAM = SpeculationOptions(method="ngram", num_speculative_tokens=3)


@pytest.fixture
def client(service):
    with Client(service.grpc_address, timeout_s=60) as client:
        yield client


def prompts(count):
    generator = torch.Generator().manual_seed(7)
    return [piece * 5 for piece in torch.randint(3, 383, (count, 6), generator=generator).tolist()]


def params(speculation=OFF, **changes):
    values = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return SamplingParams(speculation=speculation, **{**values, **changes})


def is_rank(process):
    return any("ray::TargetWorker" in word for word in process.cmdline())


def all_at_once(client, requests):
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda each: client.generate(*each), requests))


@pytest.fixture(scope="session")
def reference(tiny_model_dir):
    model = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        outputs = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            for prompt in prompts(8)
        ]
    return [output[0, 30:].tolist() for output in outputs]


@pytest.mark.parametrize("speculation", [OFF, NGRAM], ids=["off", "ngram"])
def test_greedy_tokens_equal_transformers(client, reference, speculation):
    completion = all_at_once(client, [(prompt, params(speculation)) for prompt in prompts(8)])
    assert [list(each.token_ids) for each in completion] == reference
    num_drafts = sum(each.usage.speculation.num_drafts for each in completion)
    assert (num_drafts > 0) == (speculation is NGRAM)


def test_tokens_depend_only_on_the_seed(client):
    def ask(speculation):
        return [
            (prompt, params(speculation, temperature=0.8, seed=40 + i))
            for i, prompt in enumerate(prompts(8))
        ]

    alone = [client.generate(*each).token_ids for each in ask(OFF)[:3]]
    together = [each.token_ids for each in all_at_once(client, ask(OFF))]
    assert together[:3] == alone
    for k in (1, 3, 7):
        options = SpeculationOptions(num_speculative_tokens=k)
        assert [each.token_ids for each in all_at_once(client, ask(options))] == together


def test_a_stream_equals_the_completion(client):
    chunks = list(client.generate_stream(prompts(1)[0], params(NGRAM)))
    whole = client.generate(prompts(1)[0], params(NGRAM))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    num_accepted = sum(sum(chunk.is_drafted) for chunk in chunks)
    assert num_accepted == whole.usage.speculation.num_accepted_tokens
    assert len(chunks) <= NUM_TOKENS - num_accepted  # fewer where the client reads late
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert chunks[-1].usage.prompt_tokens == 30


def test_the_first_chunk_comes_long_before_the_last_token(client):
    long = replace(params(NGRAM), max_tokens=480)
    with closing(client.generate_stream(prompts(1)[0], long)) as stream:
        assert next(stream).finish_reason is None


def test_a_stream_interval_reduces_the_number_of_chunks(client):
    prompt, plainly = prompts(1)[0], params(SpeculationOptions(enabled=False))
    whole = client.generate(prompt, plainly)
    chunks = list(client.generate_stream(prompt, plainly, stream_interval=8))
    ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
    assert {1} < set(ends) <= {1, 9, 17, 24}  # some are missing where the client reads late
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids


def test_many_parameters_in_one_request(client):
    """The effect of each parameter is visible in the response."""
    prompt = prompts(1)[0]
    many = params(
        NGRAM,
        n=3,
        temperature=0.9,
        seed=7,
        top_k=50,
        top_p=0.95,
        stop_token_ids=(382,),
        min_tokens=2,
        skip_special_tokens=False,
        min_p=0.001,
        frequency_penalty=0.5,
        logit_bias={7: -100.0},
        logprobs=2,
        prompt_logprobs=1,
    )
    completion = client.generate(prompt, many)
    assert len(completion.prompt_logprobs) == len(prompt) - 1
    for choice in completion.choices:
        assert tuple(each.chosen.token_id for each in choice.logprobs) == choice.token_ids
        assert {len(each.best) for each in choice.logprobs} == {2}
        assert 7 not in choice.token_ids
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({choice.token_ids for choice in completion.choices}) == 3
    assert completion.seed == 7
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == 3 * NUM_TOKENS
    assert (completion.usage.verifier, completion.usage.is_lossless) == ("coupled", True)
    ended = completion.choices[1].token_ids[5]
    stops = replace(many, stop_token_ids=(ended,), include_stop_str_in_output=True, n=2)
    chunks = list(client.generate_stream(prompt, stops))
    by_choice = [[chunk for chunk in chunks if chunk.choice == index] for index in range(2)]
    for choice, its_chunks in zip(completion.choices, by_choice, strict=False):
        tokens = sum((chunk.token_ids for chunk in its_chunks), ())
        assert tokens == choice.token_ids[: len(tokens)]
        assert [chunk.finish_reason is None for chunk in its_chunks[:-1]].count(False) == 0
    assert by_choice[1][-1].stop_reason == ended
    assert by_choice[1][-1].finish_reason is FinishReason.STOP
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_seed_chosen_by_the_service_reproduces_the_output(client):
    free = params(temperature=1.0)
    first = client.generate("The river", free)
    again = client.generate("The river", params(temperature=1.0, seed=first.seed))
    assert again.token_ids == first.token_ids
    assert client.generate("The river", free).token_ids != first.token_ids


def test_a_chat_is_rendered_by_the_template(client):
    asked = client.tokenize([ChatMessage("user", "Ask the baker")])
    text = "<|im_start|>user\nAsk the baker<|im_end|>\n<|im_start|>assistant\n"
    assert asked.token_ids == client.tokenize(text, add_special_tokens=False).token_ids
    completion = client.generate([ChatMessage("user", "Ask the baker")], params())
    assert completion.usage.prompt_tokens == len(asked.token_ids)


def test_model_info(client, service):
    info = client.model_info()
    assert info.architecture == "LlamaForCausalLM"
    assert info.max_model_len == 512
    assert info.speculation_method == "ngram"


@pytest.mark.parametrize(
    ("prompt", "changes", "code", "message"),
    [
        ([], {}, "INVALID_ARGUMENT", "token_ids"),
        ([5] * 512, {"max_tokens": 1}, "INVALID_ARGUMENT", "prompt length is 512; .* at most 511"),
        ([5, 9999], {}, "INVALID_ARGUMENT", r"prompt\[1\] is 9999; .* from 0 to 382"),
        ([5] * 506, {}, "INVALID_ARGUMENT", "max_tokens is 24; .* at most 6"),
        ([5], {"logit_bias": {9999: 1}}, "INVALID_ARGUMENT", r"logit_bias\.keys\[0\] is 9999"),
        ([ChatMessage("wizard", "x")], {}, "INVALID_ARGUMENT", r"messages\[0\].role is 'wizard'"),
    ],
    ids=["empty", "too long", "no such token", "no room", "no such bias", "no such role"],
)
def test_an_invalid_request_is_rejected_with_the_reason(client, prompt, changes, code, message):
    stream = client.generate_stream(prompts(1)[0], params())
    first = next(stream)
    with pytest.raises(ClientError, match=message) as error:
        client.generate(prompt, params(**changes))
    assert error.value.code is grpc.StatusCode[code]
    tokens = first.token_ids + sum((chunk.token_ids for chunk in stream), ())
    assert len(tokens) == NUM_TOKENS


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(ClientError, match="model 'gpt-9' is not served") as error:
        client.generate("x", params(), model="gpt-9")
    assert error.value.code is grpc.StatusCode.NOT_FOUND


def test_the_service_itself_rejects_out_of_range_values(service):
    """Send a raw message, since the Python client validates values too."""
    from protos.specdec.v1 import inference_pb2 as pb
    from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub

    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = InferenceServiceStub(channel)
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=-1))
        for call in (stub.Generate, lambda *a, **k: list(stub.GenerateStream(*a, **k))):
            with pytest.raises(grpc.RpcError) as error:
                call(request, timeout=30)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.value.details() == "temperature is -1.0; it must be from 0 to 100"


def test_malformed_messages_are_rejected(service, client):
    with grpc.insecure_channel(service.grpc_address) as channel:
        call = channel.unary_unary("/specdec.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError):
            call(b"\xff\xff\xff not a message", timeout=30)
    assert client.generate("x", params()).usage.completion_tokens == NUM_TOKENS


def test_a_cancelled_stream_does_not_affect_others(client, reference):
    streams = [client.generate_stream(prompt, params()) for prompt in prompts(8)]
    for stream in streams:
        next(stream)
        stream.close()
    completion = all_at_once(client, [(prompt, params()) for prompt in prompts(8)])
    assert [list(each.token_ids) for each in completion] == reference


def test_grpc_health_and_reflection(service):
    with grpc.insecure_channel(service.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=10
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = stub.ServerReflectionInfo(iter([ask]), timeout=10)
        names = {each.name for each in next(answers).list_services_response.service}
    assert "specdec.v1.InferenceService" in names


def test_idle_threads_of_a_rank_use_no_cpu(service):
    ranks = [each for each in service.descendants() if is_rank(each)]
    assert ranks
    assert all(each.environ()["GOMP_SPINCOUNT"] == "2000" for each in ranks)


@pytest.mark.skipif(sys.platform != "linux", reason="policies are Linux's")
def test_only_ranks_are_scheduled_with_wakeup_preemption(service):
    ranks = [each for each in service.descendants() if is_rank(each)]
    others = [each for each in service.descendants() if "Router" in "".join(each.cmdline())]
    assert ranks
    assert others
    for each in (*ranks, *others):
        policies = set()
        for thread in each.threads():
            with suppress(ProcessLookupError):
                policies.add(os.sched_getscheduler(thread.id))
        expected = {os.SCHED_OTHER, os.SCHED_BATCH} if each in ranks else {os.SCHED_BATCH}
        assert policies == expected


def test_only_ranks_load_torch(service):
    holders = [
        each
        for each in service.descendants()
        if "libtorch" in Path(f"/proc/{each.pid}/maps").read_text(encoding="utf-8")
    ]
    assert holders
    assert all(is_rank(each) for each in holders)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_http_health(service, path):
    assert httpx.get(service.http_url + path, timeout=10).status_code == 200


def test_the_service_listens_only_on_loopback(embedded):
    assert embedded.listening() == {("127.0.0.1", port) for port in embedded.ports}
