# Modules: cluster.replica.limits
import pytest

from cluster.api.grpc.servicers import decode_generate
from cluster.replica import limits
from protos.specdec.v1 import admin_pb2
from protos.specdec.v1 import inference_pb2 as pb
from specdec.client.calls import generate_message
from specdec.client.codec import admin
from specdec.types.errors import InvalidValueError
from specdec.types.request import ChatMessage, GenerateRequest
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import (
    VERIFIERS,
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
    logprob_token_ids=(0, 9),
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


def test_reasoning_is_not_dropped():
    marks = ReasoningMarks((), ("</think>",))
    params = SamplingParams(structured_output=StructuredOutput(regex="a", reasoning=marks))
    with pytest.raises(InvalidValueError, match="must be left out: by gRPC"):
        generate_message("Hi", params, {})


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
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids length"),
    ({"structured_output": pb.StructuredOutput()}, "structured_output"),
    ({"structured_output": pb.StructuredOutput(json_object=False)}, "structured_output"),
    ({"structured_output": pb.StructuredOutput(regex="")}, "structured_output.regex"),
    (
        {"structured_output": pb.StructuredOutput(choice=pb.TextChoices())},
        "structured_output.choice length",
    ),
]
SPECULATION_LIMITS = [
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
    without = {"include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "seed"}
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} - without
    assert {name for fields, _ in SAMPLING_LIMITS for name in fields} == names


@pytest.mark.parametrize(("fields", "field"), SPECULATION_LIMITS)
def test_a_speculation_option_beyond_its_limits_is_refused(fields, field):
    request = pb.GenerateRequest(text="Hi", speculation=pb.SpeculationOptions(**fields))
    with pytest.raises(InvalidValueError) as caught:
        decode_generate(request)
    assert caught.value.field == f"speculation.{field}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verifier": 9}, "verifier is '9'; it must be one of coupled, rejection, "),
        ({"acceptance_preset": 9}, "acceptance_threshold is '9'; it must be one of strict, "),
    ],
)
def test_an_unknown_number_of_an_enum_is_refused_by_the_known_names(fields, message):
    request = pb.GenerateRequest(text="Hi", speculation=pb.SpeculationOptions(**fields))
    with pytest.raises(InvalidValueError, match=rf"^speculation\.{message}"):
        decode_generate(request)


def test_an_unknown_number_of_a_mode_is_refused_by_the_known_names():
    with pytest.raises(InvalidValueError, match=r"^mode is '9'; it must be one of auto, on"):
        admin.CHANGE.decode(admin_pb2.SetSpeculationRequest(mode=9))


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
