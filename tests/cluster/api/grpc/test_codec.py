import numpy as np
import pytest

from cluster.api.grpc.servicers import decode_generate
from cluster.replica import limits
from cluster.replica.limits import check_detokenize, check_tokenize
from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import Choice, ModelInfo, PositionLogprobs, TokenizedInput, TokenLogprob
from specdec.client.calls import detokenize_message, generate_message, tokenize_message
from specdec.client.codec.inference import DETOKENIZE, MODEL_INFO, TOKENIZE, TOKENS
from specdec.client.codec.outputs import (
    decode_chunk,
    decode_completion,
    encode_chunk,
    encode_completion,
)
from specdec.types.errors import InvalidValueError
from specdec.types.messages import Logprobs
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import ChatMessage, DetokenizeRequest, GenerateRequest, TokenizeRequest
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import (
    VERIFIERS,
    SamplingDefaults,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)

HELLO = [ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")]
EVERY_PARAMETER = SamplingParams(
    n=3,
    temperature=0.0,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    repetition_penalty=1.1,
    presence_penalty=-0.1,
    frequency_penalty=0.1,
    logit_bias={5: -100.0, 0: 0.5},
    bad_words=("rude", "ruder"),
    allowed_token_ids=(0, 5),
    stop=("END", "\n"),
    stop_token_ids=(0, 8),
    include_stop_str_in_output=True,
    min_tokens=2,
    max_tokens=9,
    ignore_eos=True,
    seed=2**63 - 1,
    logprobs=0,
    prompt_logprobs=20,
    skip_special_tokens=False,
    structured_output=StructuredOutput(json_schema='{"type": "object"}'),
    speculation=SpeculationOptions(
        enabled=True,
        num_speculative_tokens=0,
        method="ngram",
        verifier="threshold",
        typical_epsilon=0.0,
        typical_delta=1.0,
        acceptance_threshold=0.0,
        scale_draft_temperature=False,
        draft_confidence_threshold=0.0,
        prediction="b a",
    ),
)
STRUCTURES = (
    StructuredOutput(json_object=True),
    StructuredOutput(regex="a+"),
    StructuredOutput(grammar='root ::= "a"'),
    StructuredOutput(choice=("a", "b")),
)


def output(text, token_ids, finish_reason=None, **changes):
    values = {
        "request_id": "r1",
        "token_ids": token_ids,
        "text": text,
        "finish_reason": finish_reason,
        "num_prompt_tokens": 7,
        "num_output_tokens": 3,
        "speculation": SpeculationStats(2, 6, 1),
        "is_last": finish_reason is not None,
    }
    return EngineOutput(**{**values, **changes})


def logprobs(*rows, ranks):
    """Return Logprobs. rows: the position's token, then the best ones; values follow the ids."""
    token_ids = np.array(rows, dtype=np.int32)
    return Logprobs(token_ids, -token_ids / np.float32(4), np.array(ranks, dtype=np.int32))


def spell(token_ids):
    return [f"t{token_id}" for token_id in token_ids]


USAGE = pb.Usage(
    prompt_tokens=7,
    completion_tokens=3,
    speculation=pb.SpeculationUsage(
        num_drafts=2,
        num_draft_tokens=6,
        num_accepted_tokens=1,
        verifier=pb.VERIFIER_COUPLED,
        is_lossless=True,
    ),
)


def test_a_stream_interval_is_passed_on_and_checked_later():
    for interval in (None, 0, 4):
        request = pb.GenerateRequest(text="Hi", stream_interval=interval)
        assert decode_generate(request).stream_interval == interval


def test_absent_fields_take_the_defaults():
    assert decode_generate(pb.GenerateRequest(text="Hi")) == GenerateRequest(
        model="", prompt="Hi", params=SamplingParams(), request_id=""
    )


def test_zero_is_not_absent():
    sampling = pb.SamplingParams(temperature=0, seed=0)
    speculation = pb.SpeculationOptions(enabled=False, num_speculative_tokens=0)
    request = pb.GenerateRequest(text="Hi", sampling=sampling, speculation=speculation)
    assert decode_generate(request).params == SamplingParams(
        temperature=0,
        seed=0,
        speculation=SpeculationOptions(enabled=False, num_speculative_tokens=0),
    )


def test_every_parameter_has_a_test_value():
    default = SamplingParams()
    for params, plain in (
        (EVERY_PARAMETER, default),
        (EVERY_PARAMETER.speculation, default.speculation),
    ):
        assert all(getattr(params, name) != value for name, value in vars(plain).items())


@pytest.mark.parametrize("params", [SamplingParams(), EVERY_PARAMETER])
@pytest.mark.parametrize("prompt", ["Hi", (3, 1, 2), tuple(HELLO)])
def test_requests_round_trip(prompt, params):
    request = generate_message(prompt, params, {"model": "tiny", "request_id": "mine"})
    assert decode_generate(request) == GenerateRequest(prompt, params, "tiny", "mine")


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda each: each.kind)
def test_every_structure_arrives(structure):
    params = SamplingParams(structured_output=structure)
    assert decode_generate(generate_message("Hi", params, {})).params == params


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("threshold", ["strict", "medium", "lenient", "auto", 0.25])
def test_every_verifier_and_threshold_arrives(verifier, threshold):
    options = SpeculationOptions(verifier=verifier, acceptance_threshold=threshold)
    request = generate_message("Hi", SamplingParams(speculation=options), {})
    assert decode_generate(request).params.speculation == options


SAMPLING_LIMITS = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"logit_bias": {5: 101}}, "logit_bias[5]"),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias length"),
    ({"bad_words": ["x", ""]}, "bad_words[1]"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"allowed_token_ids": pb.TokenIds()}, "allowed_token_ids length"),
    ({"stop": ["", "x"]}, "stop[0]"),
    ({"stop": ["x" * 257]}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids length"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"seed": -1}, "seed"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"structured_output": pb.StructuredOutput()}, "structured_output"),
    ({"structured_output": pb.StructuredOutput(json_object=False)}, "structured_output"),
    ({"structured_output": pb.StructuredOutput(regex="")}, "structured_output.regex"),
    ({"structured_output": pb.StructuredOutput(choice=pb.TextChoices())}, "structured_output"),
]
SPECULATION_LIMITS = [
    ({"method": 99}, "method"),
    ({"num_speculative_tokens": 33}, "num_speculative_tokens"),
    ({"verifier": 9}, "verifier"),
    ({"typical_epsilon": 1.5}, "typical_epsilon"),
    ({"typical_delta": -1}, "typical_delta"),
    ({"draft_confidence_threshold": 2.0}, "draft_confidence_threshold"),
    ({"acceptance_probability": 1.5}, "acceptance_threshold"),
    ({"acceptance_preset": 0}, "acceptance_threshold"),
    ({"acceptance_preset": 9}, "acceptance_threshold"),
]


@pytest.mark.parametrize(("fields", "field"), SAMPLING_LIMITS)
def test_a_sampling_parameter_beyond_its_limits_is_refused(fields, field):
    request = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(**fields))
    with pytest.raises(InvalidValueError) as caught:
        decode_generate(request)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


def test_every_sampling_parameter_has_a_case_beyond_its_limits():
    without = {"include_stop_str_in_output", "ignore_eos", "skip_special_tokens"}
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} - without
    assert {name for fields, _ in SAMPLING_LIMITS for name in fields} == names


@pytest.mark.parametrize(("fields", "field"), SPECULATION_LIMITS)
def test_a_speculation_option_beyond_its_limits_is_refused(fields, field):
    request = pb.GenerateRequest(text="Hi", speculation=pb.SpeculationOptions(**fields))
    with pytest.raises(InvalidValueError) as caught:
        decode_generate(request)
    assert caught.value.field == f"speculation.{field}"


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({}, "prompt"),
        ({"text": ""}, "text length"),
        ({"text": "x" * (limits.MAX_TEXT_CHARS + 1)}, "text length"),
        ({"token_ids": pb.TokenIds()}, "token_ids length"),
        ({"token_ids": pb.TokenIds(ids=[1] * (limits.MAX_TOKEN_IDS + 1))}, "token_ids length"),
        ({"chat": pb.ChatMessages()}, "messages length"),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage()] * (limits.MAX_CHAT_MESSAGES + 1))},
            "messages length",
        ),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage(content="x" * 600_000)] * 2)},
            "messages content length",
        ),
        ({"text": "Hi", "request_id": "x" * 129}, "request_id"),
        ({"text": "Hi", "model": "x" * 257}, "model"),
        ({"text": "Hi", "request_id": "a\nb"}, "request_id"),
        ({"text": "Hi", "request_id": "ä"}, "request_id"),
    ],
)
def test_a_field_beyond_its_limits_is_refused(request_fields, field):
    with pytest.raises(InvalidValueError) as caught:
        decode_generate(pb.GenerateRequest(**request_fields))
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


def test_the_limits_themselves_are_allowed():
    request = pb.GenerateRequest(text="x" * limits.MAX_TEXT_CHARS, request_id="~" * 128)
    assert decode_generate(request).request_id == "~" * 128


def test_a_stream_has_the_seed_at_both_ends_and_usage_at_the_last():
    outputs = [
        output("a", (1,)),
        output("é.", (2, 3), is_drafted=(True, False), text_lengths=(1, 1)),
        output("b", (), FinishReason.LENGTH),
    ]
    chunks = [
        encode_chunk(42, each, spell, is_first=index == 0) for index, each in enumerate(outputs)
    ]
    assert chunks == [
        pb.GenerateStreamResponse(request_id="r1", seed=42, text="a", token_ids=[1]),
        pb.GenerateStreamResponse(
            request_id="r1",
            text="é.",
            token_ids=[2, 3],
            is_drafted=[True, False],
            text_lengths=[1, 1],
        ),
        pb.GenerateStreamResponse(
            request_id="r1",
            seed=42,
            text="b",
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=USAGE,
        ),
    ]
    decoded = decode_chunk(chunks[1])
    assert (decoded.is_drafted, decoded.text_lengths) == ((True, False), (1, 1))


def test_a_seed_of_zero_is_sent():
    assert encode_chunk(0, output("a", (1,)), spell, is_first=True).HasField("seed")


def test_each_choice_of_a_stream_has_a_stop_reason_and_the_last_the_usage():
    stopped = output("a", (1,), FinishReason.STOP, is_last=False, stop_reason="END")
    last = output("b", (0,), FinishReason.STOP, choice=1, stop_reason=0, verifier="typical")
    chunks = [encode_chunk(42, each, spell, is_first=False) for each in (stopped, last)]
    assert [chunk.choice for chunk in chunks] == [0, 1]
    assert [chunk.WhichOneof("stop_reason") for chunk in chunks] == ["stop_string", "stop_token_id"]
    assert [chunk.HasField("usage") for chunk in chunks] == [False, True]
    assert not chunks[0].HasField("seed")
    assert chunks[1].usage.speculation.verifier == pb.VERIFIER_TYPICAL
    assert not chunks[1].usage.speculation.is_lossless
    first, second = map(decode_chunk, chunks)
    assert (first.stop_reason, first.finish_reason) == ("END", FinishReason.STOP)
    assert (second.stop_reason, second.usage.verifier) == (0, "typical")
    assert not second.usage.is_lossless


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_completion_joins_its_outputs(reason):
    response = encode_completion(42, [output("a", (1,)), output("b", (2, 3), reason)], spell)
    choice = pb.Choice(text="ab", token_ids=[1, 2, 3], finish_reason=f"FINISH_REASON_{reason.name}")
    assert response == pb.GenerateResponse(request_id="r1", seed=42, choices=[choice], usage=USAGE)
    assert decode_completion(response).finish_reason is reason


def test_a_completion_has_the_drafted_tokens_and_the_text_of_each():
    outputs = [
        output("a", (1,), is_drafted=(False,), text_lengths=(1,)),
        output("bcd", (2, 3), FinishReason.LENGTH, is_drafted=(True, False), text_lengths=(1, 2)),
    ]
    [choice] = decode_completion(encode_completion(42, outputs, spell)).choices
    assert (choice.is_drafted, choice.text_lengths) == ((False, True, False), (1, 1, 2))


def test_a_completion_has_its_choices_by_index():
    outputs = [
        output("a", (1,)),
        output("x", (4,), FinishReason.STOP, choice=1, is_last=False, stop_reason="s"),
        output("b", (2,)),
        output("c", (3,), FinishReason.LENGTH),
    ]
    decoded = decode_completion(encode_completion(42, outputs, spell))
    assert decoded.choices == (
        Choice(0, "abc", (1, 2, 3), FinishReason.LENGTH),
        Choice(1, "x", (4,), FinishReason.STOP, "s"),
    )
    assert (decoded.text, decoded.token_ids) == ("abc", (1, 2, 3))


def test_logprobs_arrive_as_they_were_sent():
    prompt = logprobs([7, 7, 3], [5, 3, 7], ranks=[1, 9])
    outputs = [
        output("a", (1,), logprobs=logprobs([1, 2, 1], ranks=[2]), prompt_logprobs=prompt),
        output("b", (2,), FinishReason.STOP, logprobs=logprobs([2, 2, 8], ranks=[1])),
    ]
    whole = decode_completion(encode_completion(42, outputs, spell))
    chunks = [decode_chunk(encode_chunk(42, each, spell, is_first=False)) for each in outputs]
    assert whole.logprobs == chunks[0].logprobs + chunks[1].logprobs
    assert whole.logprobs[0] == PositionLogprobs(
        TokenLogprob(1, "t1", -0.25),
        rank=2,
        best=(TokenLogprob(2, "t2", -0.5), TokenLogprob(1, "t1", -0.25)),
    )
    assert whole.prompt_logprobs == chunks[0].prompt_logprobs
    assert [each.rank for each in whole.prompt_logprobs] == [1, 9]
    assert chunks[1].prompt_logprobs is None


def test_logprobs_of_the_drawn_tokens_alone():
    last = output("a", (1,), FinishReason.STOP, logprobs=logprobs([1], ranks=[4]))
    [position] = decode_completion(encode_completion(42, [last], spell)).logprobs
    assert position == PositionLogprobs(TokenLogprob(1, "t1", -0.25), rank=4, best=())


def test_a_prompt_of_one_token_has_empty_logprobs():
    nothing = Logprobs(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32), np.zeros(0, int))
    last = output("a", (1,), FinishReason.STOP, prompt_logprobs=nothing)
    assert decode_completion(encode_completion(42, [last], spell)).prompt_logprobs == ()


def test_tokenize():
    request = tokenize_message(HELLO, "tiny", add_special_tokens=False)
    assert check_tokenize(TOKENIZE.decode(request)) == TokenizeRequest(tuple(HELLO), "tiny", False)
    assert check_tokenize(TOKENIZE.decode(pb.TokenizeRequest(text=""))) == TokenizeRequest(
        "", "", True
    )
    response = TOKENS.encode(TokenizedInput((1, 2), ("a", "b"), 64))
    expected = pb.TokenizeResponse(token_ids=[1, 2], tokens=["a", "b"], max_model_len=64)
    assert response == expected


def test_tokenize_needs_an_input():
    with pytest.raises(InvalidValueError, match=r"^input is None"):
        check_tokenize(TOKENIZE.decode(pb.TokenizeRequest()))


def test_detokenize():
    request = detokenize_message([1, 2], "tiny")
    assert request == pb.DetokenizeRequest(model="tiny", token_ids=[1, 2])
    assert check_detokenize(DETOKENIZE.decode(request)) == DetokenizeRequest((1, 2), "tiny")
    with pytest.raises(InvalidValueError, match="token_ids length is 1000001"):
        check_detokenize(DETOKENIZE.decode(pb.DetokenizeRequest(token_ids=[0] * 1_000_001)))


@pytest.mark.parametrize(("method", "count", "max_tokens"), [("ngram", 3, None), (None, 0, 99)])
def test_model_info_arrives_as_it_was_sent(method, count, max_tokens):
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
        sampling_defaults=SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1, max_tokens),
        speculation_methods=() if method is None else ("suffix", method),
    )
    arrived = MODEL_INFO.decode(MODEL_INFO.encode(info))
    assert vars(arrived) == vars(info)
