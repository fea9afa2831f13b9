import pytest

from cluster import codec
from cluster.calls import DetokenizeCall, GenerateCall, TokenizeCall
from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import ModelInfo
from specdec.client import codec as client_codec
from specdec.engine import RequestOutput
from specdec.errors import InvalidValueError
from specdec.finish_reason import FinishReason
from specdec.sampling_params import SamplingParams, SpeculationOptions
from specdec.stats import SpeculationStats
from specdec.tokenizer import ChatMessage

HELLO = [ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")]
EVERY_PARAMETER = SamplingParams(
    temperature=0.0,
    top_p=0.25,
    top_k=7,
    seed=2**63 - 1,
    stop=("END", "\n"),
    max_tokens=9,
    ignore_eos=True,
    speculation=SpeculationOptions(enabled=True, num_speculative_tokens=0, method="ngram"),
)


def output(text, token_ids, finish_reason=None):
    return RequestOutput(
        request_id="r1",
        token_ids=token_ids,
        text=text,
        finish_reason=finish_reason,
        num_prompt_tokens=7,
        num_output_tokens=3,
        speculation=SpeculationStats(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=1),
    )


USAGE = pb.Usage(
    prompt_tokens=7,
    completion_tokens=3,
    speculation=pb.SpeculationUsage(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=1),
)


def test_absent_fields_take_the_defaults():
    assert codec.decode_generate(pb.GenerateRequest(text="Hi")) == GenerateCall(
        model="", prompt="Hi", params=SamplingParams(), request_id=""
    )


def test_zero_is_not_absent():
    sampling = pb.SamplingParams(temperature=0, seed=0)
    speculation = pb.SpeculationOptions(enabled=False, num_speculative_tokens=0)
    request = pb.GenerateRequest(text="Hi", sampling=sampling, speculation=speculation)
    assert codec.decode_generate(request).params == SamplingParams(
        temperature=0,
        seed=0,
        speculation=SpeculationOptions(enabled=False, num_speculative_tokens=0),
    )


@pytest.mark.parametrize("params", [SamplingParams(), EVERY_PARAMETER])
@pytest.mark.parametrize("prompt", ["Hi", (3, 1, 2), tuple(HELLO)])
def test_what_the_client_sends_is_what_is_read(prompt, params):
    request = client_codec.encode_generate(prompt, params, "tiny", "mine")
    assert codec.decode_generate(request) == GenerateCall("tiny", prompt, params, "mine")


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({}, "prompt"),
        ({"text": ""}, "text length"),
        ({"text": "x" * (codec.MAX_TEXT_CHARS + 1)}, "text length"),
        ({"token_ids": pb.TokenIds()}, "token_ids length"),
        ({"token_ids": pb.TokenIds(ids=[1] * (codec.MAX_TOKEN_IDS + 1))}, "token_ids length"),
        ({"chat": pb.ChatMessages()}, "messages length"),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage()] * (codec.MAX_CHAT_MESSAGES + 1))},
            "messages length",
        ),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage(content="x" * 600_000)] * 2)},
            "messages content length",
        ),
        ({"text": "Hi", "request_id": "x" * 129}, "request_id"),
        ({"text": "Hi", "request_id": "a\nb"}, "request_id"),
        ({"text": "Hi", "request_id": "ä"}, "request_id"),
        ({"text": "Hi", "sampling": pb.SamplingParams(temperature=-1)}, "temperature"),
        ({"text": "Hi", "sampling": pb.SamplingParams(top_p=float("nan"))}, "top_p"),
        ({"text": "Hi", "sampling": pb.SamplingParams(seed=-1)}, "seed"),
        ({"text": "Hi", "sampling": pb.SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"text": "Hi", "sampling": pb.SamplingParams(stop=["", "x"])}, "stop[0]"),
        ({"text": "Hi", "speculation": pb.SpeculationOptions(method=7)}, "speculation.method"),
        (
            {"text": "Hi", "speculation": pb.SpeculationOptions(num_speculative_tokens=33)},
            "speculation.num_speculative_tokens",
        ),
    ],
)
def test_what_is_out_of_its_limits_is_named(request_fields, field):
    with pytest.raises(InvalidValueError) as caught:
        codec.decode_generate(pb.GenerateRequest(**request_fields))
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


def test_the_limits_themselves_are_allowed():
    request = pb.GenerateRequest(text="x" * codec.MAX_TEXT_CHARS, request_id="~" * 128)
    assert codec.decode_generate(request).request_id == "~" * 128


def test_a_stream_has_the_seed_at_both_ends_and_usage_at_the_last():
    outputs = [output("a", (1,)), output("", (2, 3)), output("b", (), FinishReason.LENGTH)]
    chunks = [
        codec.encode_stream_chunk(42, each, is_first=index == 0)
        for index, each in enumerate(outputs)
    ]
    assert chunks == [
        pb.GenerateStreamResponse(request_id="r1", seed=42, text="a", token_ids=[1]),
        pb.GenerateStreamResponse(request_id="r1", token_ids=[2, 3]),
        pb.GenerateStreamResponse(
            request_id="r1",
            seed=42,
            text="b",
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=USAGE,
        ),
    ]


def test_a_seed_of_zero_is_sent():
    assert codec.encode_stream_chunk(0, output("a", (1,)), is_first=True).HasField("seed")


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_completion_joins_its_outputs(reason):
    response = codec.encode_completion(42, [output("a", (1,)), output("b", (2, 3), reason)])
    assert response == pb.GenerateResponse(
        request_id="r1",
        seed=42,
        text="ab",
        token_ids=[1, 2, 3],
        finish_reason=f"FINISH_REASON_{reason.name}",
        usage=USAGE,
    )
    assert client_codec.decode_completion(response).finish_reason is reason


def test_tokenize():
    request = client_codec.encode_tokenize(HELLO, "tiny", add_special_tokens=False)
    assert codec.decode_tokenize(request) == TokenizeCall("tiny", tuple(HELLO), False)
    assert codec.decode_tokenize(pb.TokenizeRequest(text="")) == TokenizeCall("", "", True)
    response = codec.encode_tokens((1, 2), ["a", "b"], 64)
    expected = pb.TokenizeResponse(token_ids=[1, 2], tokens=["a", "b"], max_model_len=64)
    assert response == expected


def test_tokenize_needs_an_input():
    with pytest.raises(InvalidValueError, match=r"^input is None"):
        codec.decode_tokenize(pb.TokenizeRequest())


def test_detokenize():
    request = pb.DetokenizeRequest(model="tiny", token_ids=[1, 2])
    assert codec.decode_detokenize(request) == DetokenizeCall("tiny", (1, 2))
    with pytest.raises(InvalidValueError, match="token_ids length is 1000001"):
        codec.decode_detokenize(pb.DetokenizeRequest(token_ids=[0] * 1_000_001))


@pytest.mark.parametrize(("method", "count"), [("ngram", 3), (None, 0)])
def test_model_info_arrives_as_it_was_sent(method, count):
    info = ModelInfo(
        model="tiny",
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=100,
        max_model_len=64,
        tensor_parallel_size=2,
        speculation_method=method,
        num_speculative_tokens=count,
        version="0.1.0",
    )
    arrived = client_codec.decode_model_info(codec.encode_model_info(info))
    assert vars(arrived) == vars(info)
