import subprocess
import sys
from contextlib import suppress

import grpc
import pytest

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import (
    AdminClient,
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
from specdec.client.connection import MAX_ATTEMPTS
from specdec.types.errors import InvalidValueError
from specdec.types.request import ChatMessage
from specdec.types.responses import FinishReason
from specdec.types.sampling_params import (
    SamplingDefaults,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)
from specdec.types.stats import SpeculationStats
from tests.specdec.client.certificate import self_signed_certificate
from tests.specdec.client.fake_service import CHUNKS_OF_TWO_CHOICES, FakeService, running

USAGE = Usage(prompt_tokens=7, completion_tokens=3, speculation=SpeculationStats(2, 6, 3))


@pytest.fixture
def service():
    with running(FakeService()) as service:
        yield service


@pytest.fixture
def client(service):
    with Client(service.address, timeout_s=10) as client:
        yield client


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
        speculation=pb.SpeculationOptions(),
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


def test_an_error_about_an_invalid_api_key_does_not_contain_it():
    with pytest.raises(InvalidValueError, match="not shown") as caught:
        Client("127.0.0.1:9000", api_key="sk-secret\n")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "num_errors", "num_calls"),
    [
        ("UNAVAILABLE", 2, 3),
        ("UNAVAILABLE", 100, MAX_ATTEMPTS),
        ("RESOURCE_EXHAUSTED", 100, 1),
        ("INTERNAL", 100, 1),
        ("DEADLINE_EXCEEDED", 100, 1),
    ],
)
def test_a_call_is_retried_only_when_the_service_is_unavailable(
    client, service, code, num_errors, num_calls
):
    service.error, service.num_errors = (grpc.StatusCode[code], "no"), num_errors
    with suppress(ClientError):
        assert client.generate("Why?").text == "Blue sky"
    assert len(service.requests) == num_calls


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


def test_an_address_needs_a_port():
    with pytest.raises(InvalidValueError, match="host:port"):
        Client("localhost")


@pytest.mark.parametrize("address", ["http://127.0.0.1:8000", "HTTPS://host", "grpc://host:9000"])
def test_an_address_is_no_url(address):
    message = f"address is '{address}'; it must be host:port of the gRPC API, such as "
    with pytest.raises(InvalidValueError, match=message) as caught:
        Client(address)
    assert "without a scheme" in str(caught.value)


def test_a_rejection_carries_code_and_message(client, service):
    service.error = (grpc.StatusCode.INVALID_ARGUMENT, "top_p is 2.0; it must be at most 1")
    with pytest.raises(ClientError) as caught:
        list(client.generate_stream("Why?"))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message == str(caught.value) == "top_p is 2.0; it must be at most 1"


def test_a_broken_stream_yields_the_received_chunks_and_then_raises(client, service):
    service.error = (grpc.StatusCode.UNAVAILABLE, "the model is lost")
    service.num_chunks_before_error = 1
    stream = client.generate_stream("Why?", resume=False)
    assert next(stream).text == "Blue"
    with pytest.raises(ClientError) as caught:
        next(stream)
    expected = f"the service at {service.address} is unavailable: the model is lost"
    assert caught.value.message == expected


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:9000"])
def test_an_unreachable_address_raises_unavailable(address):
    with Client(address, timeout_s=10) as client, pytest.raises(ClientError) as caught:
        client.model_info()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.message == (
        f"no service answers at {address}; start one with `specdec serve`"
    )


def test_an_expired_deadline_raises_and_cancels_the_call(service):
    service.hangs = True
    with Client(service.address, timeout_s=0.2) as client, pytest.raises(ClientError) as caught:
        list(client.generate_stream("Why?"))
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.message.endswith("did not complete its response within 0.2 s")
    assert service.ended.wait(5), "the service did not observe the cancellation"


def test_an_unimplemented_method_reports_another_service_or_version(client, service):
    service.error = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    with pytest.raises(ClientError, match="is not a specdec service, or runs another version"):
        client.generate("Why?")


def test_tls(tmp_path):
    ca_file = tmp_path / "ca.pem"
    key, certificate = self_signed_certificate()
    ca_file.write_bytes(certificate)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    with running(FakeService(), credentials) as service:
        with Client(service.address, tls_ca_file=ca_file) as client:
            assert client.model_info().model == "tiny"
        with Client(service.address) as client, pytest.raises(ClientError):
            client.model_info()


@pytest.mark.parametrize("make", [Client, AdminClient])
def test_tls_with_a_certificate_of_another_name(tmp_path, make):
    ca_file = tmp_path / "ca.pem"
    key, certificate = self_signed_certificate("llm.example.com")
    ca_file.write_bytes(certificate)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    with running(FakeService(), credentials) as service:
        with make(service.address, tls_ca_file=ca_file) as client:
            assert "is for another name; set tls_server_name" in failure_of(client)
        named = {"tls_ca_file": ca_file, "tls_server_name": "llm.example.com"}
        with make(service.address, **named) as client:
            assert "name" not in failure_of(client)


def failure_of(client):
    """Return the error of the first call, if any; the fake service has no AdminService."""
    try:
        client.model_info() if isinstance(client, Client) else client.status()
    except ClientError as failed:
        return failed.message
    return ""


def test_tls_to_a_service_without_tls(service, tmp_path):
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(self_signed_certificate()[1])
    client = Client(service.address, tls_ca_file=ca_file)
    with client, pytest.raises(ClientError) as caught:
        client.model_info()
    assert caught.value.message == (
        f"the TLS handshake with {service.address} failed; check the address and the CA file"
    )


def test_a_missing_ca_file_is_named(tmp_path):
    with pytest.raises(InvalidValueError, match=r"tls_ca_file is .* it must be a file to read"):
        Client("127.0.0.1:9000", tls_ca_file=tmp_path / "ca.pem")


def test_closing_a_stream_cancels_the_call(client, service):
    service.hangs = True
    service.num_chunks_before_error = 1
    stream = client.generate_stream("Why?")
    next(stream)
    stream.close()
    assert service.ended.wait(5)


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
