# Modules: specdec.client.calls, specdec.client.codec.inference, specdec.types.responses
import subprocess
import sys

import grpc
import pytest

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import (
    Choice,
    Client,
    ClientError,
    Completion,
    ModelInfo,
    PositionLogprobs,
    TokenizedInput,
    TokenLogprob,
    Usage,
)
from specdec.types.errors import InvalidValueError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import ChatMessage
from specdec.types.responses import FinishReason
from specdec.types.sampling.sampling_params import (
    SamplingDefaults,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)
from tests.specdec.client.fake_service import CHUNKS_OF_TWO_CHOICES

USAGE = Usage(prompt_tokens=7, completion_tokens=3, speculation=SpeculationStats(2, 6, 3))


def test_a_stream_yields_each_chunk(client):
    first, last = client.generate_stream("Why?")
    assert (first.text, first.token_ids, first.seed) == ("Blue", (5,), 42)
    assert first.finish_reason is None
    assert first.usage is None
    assert (last.text, last.token_ids, last.request_id) == (" sky", (6, 7), "r1")
    assert last.finish_reason is FinishReason.STOP
    assert last.usage == USAGE


def test_generate_returns_the_whole_output(client):
    assert client.generate("Why?") == Completion(
        request_id="r1",
        choices=(Choice(0, "Blue sky", (5, 6, 7), FinishReason.LENGTH),),
        seed=42,
        usage=USAGE,
    )


def test_the_result_exposes_the_fields_of_its_first_choice(client):
    generated = client.generate("Why?")
    assert (generated.text, generated.token_ids) == ("Blue sky", (5, 6, 7))
    assert (generated.finish_reason, generated.stop_reason) == (FinishReason.LENGTH, None)
    assert generated.logprobs is generated.prompt_logprobs is None


def test_chunks_of_several_choices_with_logprobs(client, service):
    service.chunks = CHUNKS_OF_TWO_CHOICES
    first, other, last = client.generate_stream("Why?", SamplingParams(n=2, logprobs=1))
    assert [each.choice for each in (first, other, last)] == [0, 1, 0]
    assert [each.stop_reason for each in (first, other, last)] == [None, "END", 6]
    [position] = other.logprobs
    assert position == PositionLogprobs(
        TokenLogprob(4, "Red", -1.5), rank=2, best=(TokenLogprob(5, "Blue", -0.5),)
    )
    assert [each.chosen.token for each in first.prompt_logprobs] == ["Why"]
    assert other.prompt_logprobs is last.prompt_logprobs is None
    assert (other.usage, last.usage) == (None, USAGE)


def test_a_stream_interval_is_sent_only_when_given(client, service):
    list(client.generate_stream("Why?", stream_interval=4))
    list(client.generate_stream("Why?"))
    asked, left_open = service.requests
    assert asked.stream_interval == 4
    assert not left_open.HasField("stream_interval")


def test_a_stream_of_several_choices_is_not_resumed(client, service):
    service.error = (grpc.StatusCode.UNAVAILABLE, "the replica is lost")
    service.num_chunks_before_error = 1
    stream = client.generate_stream("Why?", SamplingParams(n=2))
    next(stream)
    with pytest.raises(ClientError, match="the replica is lost"):
        next(stream)
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("Why?", {"text": "Why?"}),
        ("", {"text": ""}),
        ((3, 1), {"token_ids": pb.TokenIds(ids=[3, 1])}),
        (
            [ChatMessage("user", "Why?")],
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Why?")])},
        ),
    ],
)
def test_every_kind_of_prompt_is_sent(client, service, prompt, sent):
    client.generate(prompt, model="tiny", request_id="mine")
    expected = pb.GenerateRequest(
        model="tiny",
        request_id="mine",
        sampling=pb.SamplingParams(),
        **sent,
    )
    assert service.requests == [expected]


def test_every_parameter_is_sent(client, service):
    params = SamplingParams(
        n=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={7: -1.5},
        bad_words=("rude",),
        allowed_token_ids=(1, 7),
        stop=("\n", "END"),
        stop_token_ids=(9,),
        include_stop_str_in_output=True,
        min_tokens=2,
        max_tokens=8,
        ignore_eos=True,
        seed=2**63 - 1,
        logprobs=0,
        prompt_logprobs=5,
        skip_special_tokens=False,
        structured_output=StructuredOutput(regex="a+"),
        speculation=SpeculationOptions(
            enabled=False,
            num_speculative_tokens=0,
            method="ngram",
            verifier="typical",
            typical_epsilon=0.0,
            typical_delta=0.5,
            acceptance_threshold=0.0,
            scale_draft_temperature=False,
            draft_confidence_threshold=0.5,
            prediction="a b",
        ),
    )
    client.generate("Why?", params)
    [request] = service.requests
    assert request.sampling == pb.SamplingParams(
        n=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={7: -1.5},
        bad_words=["rude"],
        allowed_token_ids=pb.TokenIds(ids=[1, 7]),
        stop=["\n", "END"],
        stop_token_ids=[9],
        include_stop_str_in_output=True,
        min_tokens=2,
        max_tokens=8,
        ignore_eos=True,
        seed=2**63 - 1,
        logprobs=0,
        prompt_logprobs=5,
        skip_special_tokens=False,
        structured_output=pb.StructuredOutput(regex="a+"),
    )
    assert request.speculation == pb.SpeculationOptions(
        enabled=False,
        num_speculative_tokens=0,
        method=pb.SPECULATION_METHOD_NGRAM,
        verifier=pb.VERIFIER_TYPICAL,
        typical_epsilon=0,
        typical_delta=0.5,
        acceptance_probability=0,
        scale_draft_temperature=False,
        draft_confidence_threshold=0.5,
        prediction="a b",
    )


def test_parameters_at_their_defaults_are_not_sent(client, service):
    client.generate("Why?", SamplingParams(n=1, presence_penalty=0, logit_bias={}, stop=()))
    assert service.requests[0].sampling == pb.SamplingParams()


def test_tokenize(client, service):
    assert client.tokenize("ab", add_special_tokens=False) == TokenizedInput((1, 2), ("a", "b"), 64)
    client.tokenize([ChatMessage("user", "ab")])
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="ab")])
    assert service.requests == [
        pb.TokenizeRequest(text="ab", add_special_tokens=False),
        pb.TokenizeRequest(chat=chat, add_special_tokens=True),
    ]


def test_detokenize(client, service):
    assert client.detokenize([1, 2]) == "Blue"
    assert service.requests == [pb.DetokenizeRequest(token_ids=[1, 2])]


def test_the_api_key_is_sent_with_every_call(service):
    with Client(service.address, api_key="sk-correct-horse") as client:
        calls = [
            lambda: client.generate("Why?"),
            lambda: list(client.generate_stream("Why?")),
            lambda: client.tokenize("ab"),
            lambda: client.detokenize([1]),
            client.model_info,
        ]
        for call in calls:
            service.metadata = {}
            call()
            assert service.metadata["authorization"] == "Bearer sk-correct-horse"
        assert "horse" not in repr(client._destination)


def test_model_info(client):
    assert client.model_info() == ModelInfo(
        model="tiny",
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=100,
        max_model_len=64,
        tensor_parallel_size=2,
        speculation_method="ngram",
        num_speculative_tokens=3,
        version="0.1.0",
        sampling_defaults=SamplingDefaults(0.6, 0.9, 20, 0.0, 1.1, 99),
        speculation_methods=("ngram", "draft_model"),
    )


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("\udcff",), "text"),
        (([2**31],), "token_ids[0]"),
        (("Why?", SamplingParams(max_tokens=2**31)), "max_tokens"),
        (("Why?", SamplingParams(logit_bias={2**31: 1})), "logit_bias.keys[0]"),
        (("Why?", SamplingParams(stop_token_ids=(1, 2**31))), "stop_token_ids[1]"),
        (("Why?", SamplingParams(allowed_token_ids=(2**31,))), "allowed_token_ids[0]"),
    ],
)
def test_a_value_that_cannot_be_encoded_is_rejected_before_the_call(
    client, service, arguments, field
):
    with pytest.raises(InvalidValueError) as caught:
        client.generate_stream(*arguments)
    assert caught.value.field == field
    assert service.requests == []


def test_closing_a_stream_cancels_the_call(client, service):
    service.hangs = True
    service.num_chunks_before_error = 1
    stream = client.generate_stream("Why?")
    next(stream)
    stream.close()
    assert service.ended.wait(30)


def test_importing_the_client_loads_no_engine():
    program = "import sys, specdec.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "specdec.client" in loaded
    assert not loaded & {
        "torch",
        "transformers",
        "numpy",
        "specdec.engine.engine",
        "specdec.config.engine",
    }
