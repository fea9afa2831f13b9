"""The `specdec` command against a service in this process."""

import json
import subprocess
import sys
from typing import get_args

import grpc
import pytest
from click.testing import CliRunner

from cluster.cli import completion_result, main
from cluster.cli import generate as generate_module
from cluster.cli.models import DTYPES, KERNELS, KV_DTYPES, QUANTIZATIONS
from protos.specdec.v1 import inference_pb2 as pb
from specdec.client import StreamChunk, resumption
from specdec.config.engine import DTYPE_BYTES, Kernels
from specdec.config.kv_cache import KV_CACHE_DTYPES
from specdec.config.quantization import QUANTIZATION_METHODS
from specdec.models.resolve import packaged_directory
from specdec.types.errors import ModelNotFoundError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import Usage
from specdec.worker import native_library_fault
from tests.specdec.client.fake_service import CHUNKS, CHUNKS_OF_TWO_CHOICES, FakeService, running
from tests.specdec.models.families import save_family


@pytest.fixture
def service():
    with running(FakeService()) as service:
        yield service


@pytest.fixture
def generate(service):
    def run(*arguments, **options):
        return run_cli("generate", "--address", service.address, *arguments, **options)

    return run


def run_cli(*arguments, **options):
    return CliRunner().invoke(main.main, arguments, **options)


def fails_with(result, line):
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {line}\n"


# generate


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
        "output token          logprob   rank  best",
        '"Blue"                 -0.500      1  "Blue" -0.500',
        '"Ġsky"                 -0.250      1  "Ġsky" -0.250',
        '--- choice 1, stop at "END"',
        "Red",
        "output token          logprob   rank  best",
        '"Red"                  -1.500      2  "Blue" -0.500',
        "prompt token          logprob   rank  best",
        '"Why"                  -2.000      3  "How" -1.000',
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


def test_help_groups_the_flags_into_sections():
    text = run_cli("generate", "--help").stdout
    headings = ["Options", "Length and", "Sampling", "Structured output", "Speculation", "Output"]
    positions = [text.index(f"\n{heading}") for heading in headings]
    assert positions == sorted(positions)
    assert "\nOutput:" not in run_cli("chat", "--help").stdout


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


def test_an_unreachable_service():
    result = run_cli("generate", "--address", "127.0.0.1:1", "Why?")
    fails_with(result, "no service answers at 127.0.0.1:1; start one with `specdec serve`")


def test_the_timeout(generate, service):
    service.hangs = True
    result = generate("--timeout", "0.2", "Why?")
    fails_with(result, f"{service.address} did not complete its response within 0.2 s")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "--timeout", "0", "Why?"],
        ["generate", "--top-k", "many", "Why?"],
        ["generate", "--logit-bias", "5", "Why?"],
        ["generate", "--logit-bias", "x=5", "Why?"],
        ["generate", "--verifier", "dice", "Why?"],
        ["generate", "--json-schema", "/no/such/file", "Why?"],
        ["chat", "--n", "2"],
        ["generate", "--tls-ca-file", "/no/such/file", "Why?"],
        ["serve", "--dtype", "float64"],
        ["serve", "--config", "/no/such/file"],
        ["dance"],
    ],
)
def test_wrong_usage(arguments):
    assert run_cli(*arguments).exit_code == 2


def test_an_unknown_command_names_the_nearest():
    result = run_cli("generat", "Why?")
    assert result.exit_code == 2
    assert "No such command 'generat'. Did you mean 'generate'?" in result.stderr
    assert "Did you mean" not in run_cli("xyz").stderr


def test_ctrl_c_is_quiet(generate, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "receive", interrupt)
    result = generate("Why?")
    assert (result.exit_code, result.output) == (130, "")


def test_an_unexpected_error_is_one_line(generate, monkeypatch):
    def fail(*_):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(generate_module, "receive", fail)
    fails_with(
        generate("Why?"),
        "unexpected RuntimeError: two lines (set SPECDEC_DEBUG=1 to see the traceback)",
    )
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    assert isinstance(generate("Why?").exception, RuntimeError)


def test_timing_by_a_clock():
    chunks = [StreamChunk("r1", "", (), None, 42, None)]
    chunks += [
        StreamChunk(each.request_id, each.text, tuple(each.token_ids), None, None, None)
        for each in CHUNKS
    ]
    ticks = iter([10.0, 10.5, 12.0])
    shown = []
    timed = completion_result.receive(iter(chunks), shown.append, clock=lambda: next(ticks))
    assert shown == chunks
    assert (timed.first_token_s, timed.total_s) == (0.5, 2.0)


def test_a_request_without_drafts_has_no_acceptance():
    usage = Usage(4, 2, SpeculationStats())
    chunks = (StreamChunk("r1", "a", (1, 2), "length", 42, usage),)
    result = completion_result.CompletionResult(chunks, 0.5, 1.0)
    assert result.summary == "2 tokens, first after 0.50 s, 2.0 tokens/s, no drafts"


def modules_of(command):
    """Return the modules that the help of a command imports."""
    program = (
        "import sys; from cluster.cli.main import main; "
        f"main(['{command}', '--help'], standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("command", ["train", "train-data", "eval-drafter"])
def test_training_imports_neither_the_service_nor_its_client(command):
    loaded = modules_of(command)
    assert "specdec.config.llm" in loaded
    assert not loaded & {"ray", "grpc", "protos", "fastapi", "starlette", "yaml", "torch"}


def test_generate_imports_no_slow_modules():
    loaded = modules_of("generate")
    assert "cluster.cli.generate" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "ray", "fastapi", "httpx"}
    assert "specdec.config.engine" not in loaded


# models, version


def test_fetch_prints_where_the_model_is(monkeypatch, tmp_path):
    def resolve(name, cache_dir=None, progress=None):
        progress(f"fetching {name}")
        return tmp_path / name

    monkeypatch.setattr("specdec.models.resolve.resolve", resolve)
    result = run_cli("models", "fetch", "tiny")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'tiny'}\n"
    assert result.stderr == "fetching tiny\n"
    result = json.loads(run_cli("models", "fetch", "tiny", "--json").stdout)
    assert result == {"name": "tiny", "directory": str(tmp_path / "tiny")}


def test_fetching_an_unknown_model(monkeypatch):
    def resolve(name, cache_dir=None, progress=None):
        raise ModelNotFoundError("no model is called 'tiny'")

    monkeypatch.setattr("specdec.models.resolve.resolve", resolve)
    fails_with(run_cli("models", "fetch", "tiny"), "no model is called 'tiny'")


def test_list_shows_what_is_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    assert "smollm2-135m-instruct\tnot fetched (" in run_cli("models", "list").stdout
    directory = packaged_directory("smollm2-135m-instruct", tmp_path)
    directory.mkdir(parents=True)
    assert f"smollm2-135m-instruct\t{directory}\n" in run_cli("models", "list").stdout
    [model] = json.loads(run_cli("models", "list", "--json").stdout)["models"]
    assert model["name"] == "smollm2-135m-instruct"
    assert (model["directory"], model["download_bytes"] > 0) == (str(directory), True)


def test_show_reports_decoder_memory_and_methods(tiny_model_dir):
    result = run_cli("models", "show", str(tiny_model_dir), "--tensor-parallel-size", "2")
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["architecture"].startswith("LlamaForCausalLM: biases by")
    assert lines["precision"] == "float32 (float32 in files), no quantization"
    assert lines["ngram"].startswith("ready: ")
    assert lines["draft_model"].startswith("needs files: ")
    assert lines["mtp"].startswith("no: the checkpoint has no layers for")
    assert result.stdout.count(" KiB of KV a token") == 2
    arguments = ("--kernels", "torch", "--quantization", "int8", "--json")
    report = json.loads(run_cli("models", "show", str(tiny_model_dir), *arguments).stdout)
    assert report["decoder"] == "torch: kernels is torch"
    assert report["quantization"] == "int8"
    assert report["ranks"][0]["kv_bytes_per_token"] == 2 * 2 * 3 * 16 * 4
    report = json.loads(
        run_cli("models", "show", str(tiny_model_dir), *arguments, "--kv-cache-dtype", "fp8").stdout
    )
    assert report["ranks"][0]["kv_bytes_per_token"] == 2 * 2 * 3 * 16


@pytest.mark.skipif(bool(native_library_fault()), reason="no C++ compiler")
def test_show_reports_native_latent_attention(tmp_path):
    save_family(tmp_path, "deepseek-v3")
    report = json.loads(run_cli("models", "show", str(tmp_path), "--json").stdout)
    assert report["decoder"] == "native C++ kernels"
    assert report["ranks"][0]["kv_bytes_per_token"] == 3 * (34 + 6) * 4


def test_show_refuses_a_model_that_cannot_be_served(tmp_path):
    content = {"architectures": ["MambaForCausalLM"], "state_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(content))
    result = run_cli("models", "show", str(tmp_path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "MambaForCausalLM is not supported: it has state-space layers" in result.stderr


def test_choices_of_show_are_those_of_the_engine():
    assert set(DTYPES) == set(DTYPE_BYTES)
    assert set(QUANTIZATIONS) == {"none", *QUANTIZATION_METHODS}
    assert set(KERNELS) == set(get_args(Kernels))
    assert KV_DTYPES == KV_CACHE_DTYPES


def test_version():
    assert run_cli("version").stdout == run_cli("--version").stdout
    assert run_cli("version").stdout.startswith("specdec ")
    version = json.loads(run_cli("version", "--json").stdout)["version"]
    assert run_cli("version").stdout == f"specdec {version}\n"


# tokenize


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


# errors


def test_with_json_errors_are_json(generate, service):
    result = generate("--json", "--temperature", "101", "Why?")
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads(result.stderr)["error"] == {
        "kind": "INVALID_ARGUMENT",
        "message": "temperature is 101.0; it must be from 0 to 100",
        "field": "temperature",
        "limit": "from 0 to 100",
    }
    service.error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    error = json.loads(generate("--json", "Why?").stderr)["error"]
    assert error == {"kind": "RESOURCE_EXHAUSTED", "message": "the queue is full"}


def test_a_prompt_of_json_is_not_the_flag(generate, service):
    service.error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    fails_with(generate("--", "--json"), "the queue is full")
