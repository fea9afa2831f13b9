# Modules: cluster.cli.options, cluster.cli.parameter_types
"""`specdec generate` and `specdec tokenize` against a fake service: requests and output."""

import json

import grpc
import pytest

from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import resumption
from specdec.client.codec.receipts import RECEIPT
from specdec.types.reports.receipts import Opening, Receipt
from tests.cluster.cli.conftest import fails_with, run_cli
from tests.specdec.client.fake_service import CHUNKS, CHUNKS_OF_TWO_CHOICES


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_the_text_alone_is_on_stdout(generate, flag):
    result = generate(flag, "Why?")
    assert result.exit_code == 0
    assert result.stdout == "Blue sky\n"
    assert result.stderr.startswith("3 tokens, first after 0.")
    assert result.stderr.endswith("acceptance rate 50%, acceptance length 2.50\n")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["Why?"], [("user", "Why?")]),
        (["--system", "Be brief.", "Why?"], [("system", "Be brief."), ("user", "Why?")]),
    ],
)
def test_a_prompt_is_a_chat_message(generate, service, arguments, messages):
    generate(*arguments)
    [request] = service.requests
    assert [(turn.role, turn.content) for turn in request.chat.messages] == messages


def test_a_prompt_goes_to_a_served_model(generate, service):
    generate("--model", "sql", "Why?")
    generate("Why?")
    assert [request.model for request in service.requests] == ["sql", ""]


def test_a_raw_prompt_is_sent_as_it_is(generate, service):
    generate("--raw", "Why?")
    assert service.requests[0].text == "Why?"
    assert generate("--raw", "--system", "Be brief.", "Why?").exit_code == 2


def test_a_prompt_from_stdin(generate, service):
    generate("--raw", "-", input="One\ntwo\n")
    assert service.requests[0].text == "One\ntwo"


def test_invalid_utf8_is_rejected(generate):
    result = generate("--raw", "-", input=b"\xff\n")
    fails_with(result, r"text is '\udcff'; it must be valid Unicode")


def test_every_flag_reaches_the_service(generate, service, tmp_path):
    predicted = tmp_path / "before.txt"
    predicted.write_text("as it was\n")
    flags = "--max-tokens 5 --min-tokens 2 --stop a --stop b --stop-token-id 3 --include-stop"
    flags += " --ignore-eos --show-special-tokens --temperature 0 --top-p 0.9 --top-k 3"
    flags += " --min-p 0.25 --repetition-penalty 1.5 --presence-penalty -0.5"
    flags += " --frequency-penalty 0.5 --logit-bias 4=-1.5 --logit-bias 0=2 --bad-word c"
    flags += " --allowed-token-id 0 --allowed-token-id 4 --seed 0 --choice yes --choice no"
    flags += " --no-speculation --num-speculative-tokens 2 --speculation-method ngram"
    flags += " --verifier threshold --acceptance-threshold strict --typical-epsilon 0"
    flags += " --typical-delta 0.5 --scale-draft-temperature -n 2 --logprobs 0 --prompt-logprobs 3"
    flags += " --logprob-token-id 6 --logprob-token-id 0"
    flags += f" --draft-confidence-threshold 0.25 --prediction {predicted}"
    assert generate(*flags.split(), "Why?").exit_code == 0
    [request] = service.requests
    assert request.sampling == pb.SamplingParams(
        n=2,
        temperature=0,
        top_p=0.9,
        top_k=3,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        logit_bias={4: -1.5, 0: 2},
        bad_words=["c"],
        allowed_token_ids=pb.TokenIds(ids=[0, 4]),
        structured_output=pb.StructuredOutput(choice=pb.TextChoices(texts=["yes", "no"])),
        stop=["a", "b"],
        stop_token_ids=[3],
        include_stop_str_in_output=True,
        min_tokens=2,
        max_tokens=5,
        ignore_eos=True,
        seed=0,
        logprobs=0,
        prompt_logprobs=3,
        logprob_token_ids=[6, 0],
        skip_special_tokens=False,
    )
    assert request.speculation == pb.SpeculationOptions(
        enabled=False,
        num_speculative_tokens=2,
        method=pb.SPECULATION_METHOD_NGRAM,
        verifier=pb.VERIFIER_THRESHOLD,
        typical_epsilon=0,
        typical_delta=0.5,
        acceptance_preset=pb.ACCEPTANCE_PRESET_STRICT,
        scale_draft_temperature=True,
        draft_confidence_threshold=0.25,
        prediction="as it was\n",
    )
    for message in (request.sampling, request.speculation):
        unset = {each.name for each in message.DESCRIPTOR.fields if not is_set(message, each)}
        assert unset <= {"acceptance_probability"}, "a parameter without a flag"


def is_set(message, field):
    return any(field.name == each.name for each, _ in message.ListFields())


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar"])
def test_schemas_and_grammars_are_read_from_files(generate, service, tmp_path, flag):
    path = tmp_path / "form"
    path.write_text('{"title": "Größe"}', encoding="utf-8")
    generate(flag, str(path), "Why?")
    form = flag.removeprefix("--").replace("-", "_")
    expected = pb.StructuredOutput(**{form: '{"title": "Größe"}'})
    assert service.requests[0].sampling.structured_output == expected


@pytest.mark.parametrize(
    ("flag", "form"), [("--json-object", "json_object"), ("--regex=a", "regex")]
)
def test_other_structured_outputs_are_flags(generate, service, flag, form):
    generate(flag, "Why?")
    assert service.requests[0].sampling.structured_output.WhichOneof("form") == form


def test_structured_outputs_are_mutually_exclusive(generate):
    result = generate("--json-object", "--regex", "a", "Why?")
    assert result.stderr.startswith("error: structured_output is ['json_object', 'regex']; it must")


def test_a_probability_as_threshold(generate, service):
    generate("--acceptance-threshold", "0.25", "Why?")
    assert service.requests[0].speculation.acceptance_probability == 0.25
    result = generate("--acceptance-threshold", "harsh", "Why?")
    expected = "one of strict, medium, lenient, auto"
    fails_with(result, f"speculation.acceptance_threshold is 'harsh'; it must be {expected}")


def test_without_flags_the_service_decides_on_speculation(generate, service):
    generate("Why?")
    [request] = service.requests
    assert request.speculation == pb.SpeculationOptions()
    assert not request.sampling.HasField("seed")
    assert not request.sampling.HasField("max_tokens")


def test_json_is_one_object(generate):
    result = generate("--json", "Why?")
    assert result.stderr == ""
    [line] = result.stdout.splitlines()
    content = json.loads(line)
    assert content.pop("time_to_first_token_s") <= content.pop("total_s")
    assert content.pop("tokens_per_s") > 0
    choice = {
        "index": 0,
        "text": "Blue sky",
        "token_ids": [5, 6, 7],
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert content == {
        "choices": [choice],
        "request_id": "r1",
        "seed": 42,
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "speculation": {"num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3},
            "verifier": "coupled",
            "is_lossless": True,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
        "acceptance_rate": 0.5,
        "mean_acceptance_length": 2.5,
    }


def test_streamed_json_is_a_line_per_chunk_and_one_with_statistics(generate):
    result = generate("--json", "--stream", "Why?")
    *chunks, outcome = [json.loads(line) for line in result.stdout.splitlines()]
    assert chunks == [
        {"choice": 0, "text": "Blue", "token_ids": [5]},
        {"choice": 0, "text": " sky", "token_ids": [6, 7], "finish_reason": "stop"},
    ]
    assert "choices" not in outcome
    assert outcome["seed"] == 42


def test_several_choices_and_their_logprobs_as_text(generate, service):
    service.chunks = CHUNKS_OF_TWO_CHOICES
    assert generate("-n", "2", "--logprobs", "1", "Why?").stdout.splitlines() == [
        "--- choice 0, stop at 6",
        "Blue sky",
        "output token  logprob  rank  best",
        '"Blue"         -0.500     1  "Blue" -0.500',
        '"Ġsky"         -0.250     1  "Ġsky" -0.250',
        '--- choice 1, stop at "END"',
        "Red",
        "output token  logprob  rank  best",
        '"Red"          -1.500     2  "Blue" -0.500',
        "prompt token  logprob  rank  best",
        '"Why"          -2.000     3  "How" -1.000',
    ]


def test_several_choices_stream_as_json_only(generate, service):
    service.chunks = CHUNKS_OF_TWO_CHOICES
    assert generate("-n", "2", "--stream", "Why?").exit_code == 2
    lines = generate("-n", "2", "--stream", "--json", "Why?").stdout.splitlines()
    first, second, third, _ = map(json.loads, lines)
    assert [each["choice"] for each in (first, second, third)] == [0, 1, 0]
    assert first["prompt_logprobs"][0]["chosen"] == {
        "token_id": 9,
        "token": "Why",
        "logprob": -2.0,
    }
    assert (second["stop_reason"], third["stop_reason"]) == ("END", 6)


def test_json_holds_every_choice_and_all_logprobs(generate, service):
    service.chunks = CHUNKS_OF_TWO_CHOICES
    content = json.loads(generate("-n", "2", "--json", "Why?").stdout)
    assert [each["text"] for each in content["choices"]] == ["Blue sky", "Red"]
    assert [each["rank"] for each in content["choices"][0]["logprobs"]] == [1, 1]
    best = content["choices"][1]["logprobs"][0]["best"]
    assert best == [{"token_id": 5, "token": "Blue", "logprob": -0.5}]
    assert content["prompt_logprobs"][0]["rank"] == 3


def test_a_verifier_that_is_not_lossless_is_named(generate, service):
    lossy = pb.GenerateStreamResponse()
    lossy.CopyFrom(CHUNKS[-1])
    lossy.usage.speculation.verifier = pb.VERIFIER_TYPICAL
    lossy.usage.speculation.is_lossless = False
    service.chunks = (CHUNKS[0], lossy)
    assert generate("Why?").stderr.endswith("length 2.50, lossy verifier typical\n")


def test_a_value_out_of_its_limits(generate, service):
    result = generate("--temperature", "101", "Why?")
    fails_with(result, "temperature is 101.0; it must be from 0 to 100")
    assert service.requests == []


def test_an_error_of_the_service(generate, service):
    service.error = (grpc.StatusCode.INVALID_ARGUMENT, "prompt length is 9; it must be at most 8")
    fails_with(generate("Why?"), "prompt length is 9; it must be at most 8")


def test_an_interrupted_stream_ends_its_line(generate, service, monkeypatch):
    monkeypatch.setattr(resumption, "RESUME_DELAYS_S", (0.0,))
    service.error = (grpc.StatusCode.UNAVAILABLE, "the model is lost")
    service.num_chunks_before_error = 1
    result = generate("--stream", "Why?")
    assert (result.exit_code, result.stdout) == (1, "Blue\n")
    assert result.stderr.endswith("is unavailable: the model is lost\n")


@pytest.fixture
def receipt(service):
    """A receipt that the service issues."""
    receipt = Receipt('{"seed":42}', "aa", "bb", Opening("00", (1,), ((5, 6, 7),)))
    *others, last = CHUNKS
    last = pb.GenerateStreamResponse.FromString(last.SerializeToString())
    last.receipt.CopyFrom(RECEIPT.encode(receipt))
    service.chunks = (*others, last)
    return receipt


def test_a_receipt_is_written_to_a_file(generate, service, receipt, tmp_path):
    path = tmp_path / "receipt.json"
    assert generate("--receipt", str(path), "Why?").exit_code == 0
    assert service.requests[0].receipt
    assert Receipt.from_json(path.read_bytes()) == receipt


def test_a_receipt_that_the_service_does_not_issue_is_an_error(generate, tmp_path):
    result = generate("--receipt", str(tmp_path / "receipt.json"), "Why?")
    assert result.exit_code == 1
    assert result.stderr.endswith("Error: the service returned no receipt\n")
    assert result.stdout, "the answer is printed"


@pytest.mark.parametrize("parent", ["missing", "file", "x" * 300])
def test_a_receipt_needs_a_file_that_can_be_written(generate, service, tmp_path, parent):
    (tmp_path / "file").touch()
    result = generate("--receipt", str(tmp_path / parent / "receipt.json"), "Why?")
    assert (result.exit_code, service.requests) == (2, [])
    assert "is not writable" in result.stderr


@pytest.mark.usefixtures("receipt")
def test_a_receipt_that_cannot_be_written_is_an_error_with_the_reason(generate, tmp_path):
    path = tmp_path / ("x" * 300)
    result = generate("--receipt", str(path), "Why?")
    assert (result.exit_code, result.stdout) == (1, "Blue sky\n")
    assert result.stderr.endswith(f"Error: {path} cannot be written: File name too long\n")


def test_an_unreachable_service():
    result = run_cli("generate", "--address", "127.0.0.1:1", "Why?")
    fails_with(result, "no service answers at 127.0.0.1:1; start one with `specdec serve`")


def test_the_timeout(generate, service):
    service.hangs = True
    result = generate("--timeout", "0.2", "Why?")
    fails_with(result, f"{service.address} did not complete its response within 0.2 s")


def test_tokens_one_per_line_and_their_number(service):
    result = run_cli("tokenize", "--address", service.address, "ab")
    assert result.stdout == "1\ta\n2\tb\n"
    assert result.stderr == "2 tokens (max_model_len is 64)\n"
    assert service.requests[0].text == "ab"
    run_cli("tokenize", "--address", service.address, "--chat", "-", input="Why?\n")
    assert service.requests[1].chat.messages[0].content == "Why?"
    run_cli("tokenize", "--address", service.address, "--model", "sql", "ab")
    assert service.requests[2].model == "sql"


def test_tokens_as_json(service):
    result = json.loads(run_cli("tokenize", "--address", service.address, "--json", "ab").stdout)
    assert result == {"token_ids": [1, 2], "tokens": ["a", "b"], "max_model_len": 64}


def test_a_further_attempt_is_reported_on_stderr(generate, service, monkeypatch):
    monkeypatch.setattr(resumption, "RESUME_DELAYS_S", (0.0,))
    service.error, service.num_errors = (grpc.StatusCode.UNAVAILABLE, "the replica is lost"), 1
    service.num_chunks_before_error = 1
    result = generate("--stream", "Why?")
    assert (result.exit_code, result.stdout) == (0, "Blue sky\n")
    failure = f"the service at {service.address} is unavailable: the replica is lost"
    assert result.stderr.startswith(f"{failure}; trying again in 0.0 s\n3 tokens, ")


def test_loopback_never_goes_through_a_proxy(generate, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert generate("Why?").stdout == "Blue sky\n"
