# Modules: cluster.cli.bench.cli, cluster.cli.bench.load_flags, cluster.cli.bench.load_options
# Modules: cluster.cli.bench.load_report
"""`specdec bench serve` against a fake service."""

import json
from xml.etree import ElementTree

import grpc
import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.cli.bench import charts, cli, load
from protos.specdec.v1 import inference_pb2 as pb
from tests.specdec.client.fake_service import FakeService, running

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def service():
    with running(FakeService()) as service:
        yield service


@pytest.fixture
def bench(service):
    def run(*arguments):
        arguments = ["bench", "serve", "--address", service.address, *map(str, arguments)]
        return CliRunner().invoke(main.main, arguments)

    return run


def generate_requests(service):
    return [each for each in service.requests if isinstance(each, pb.GenerateRequest)]


def test_the_text_of_the_options_has_no_key(bench, monkeypatch):
    shown = []
    monkeypatch.setattr(
        cli, "_reject_flags_without_effect", lambda _, each: shown.append(str(each))
    )
    assert bench("--num-prompts", 1, "--api-key", "sk-secret").exit_code == 0
    assert "num_prompts=1" in shown[0]
    assert "secret" not in shown[0]


def test_the_text_report(bench):
    result = bench("--num-prompts", 4, "--max-concurrency", 2, "--goodput", "ttft:60000")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny, grpc, concurrency 2"
    assert lines[1].startswith("requests  4 in ")
    assert "goodput" in lines[2]
    assert lines[3].startswith("tokens    28 input, 12 output, ")
    assert lines[4].split() == ["ms", "mean", "median", "p90", "p95", "p99"]
    assert [line.split()[0] for line in lines[5:9]] == ["ttft", "tpot", "itl", "e2el"]
    assert lines[9:] == ["drafts    8, acceptance rate 50%, acceptance length 2.50"]
    assert result.stderr == "", "a progress bar without a terminal"


def test_json_and_file_have_the_names_of_vllm(bench, tmp_path):
    output = tmp_path / "report.json"
    flags = ["--max-concurrency", "1,2", "--num-prompts", 3, "--output", output]
    flags += ["--metric-percentiles", "50,99.9", "--seed", 5]
    report = json.loads(bench(*flags, "--json").stdout)
    assert json.loads(output.read_text()) == report
    assert (report["backend"], report["model"], report["seed"]) == ("grpc", "tiny", 5)
    assert [run["max_concurrency"] for run in report["runs"]] == [1, 2]
    for run in report["runs"]:
        assert (run["completed"], run["failed"], run["errors"]) == (3, 0, {})
        assert (run["total_input_tokens"], run["total_output_tokens"]) == (21, 9)
        assert run["spec_decode_acceptance_rate"] == 0.5
        assert run["spec_decode_acceptance_length"] == 2.5
        for name in ("ttft", "tpot", "itl", "e2el"):
            for statistic in ("mean", "median", "std", "p50", "p99.9"):
                assert run[f"{statistic}_{name}_ms"] >= 0
        assert run["p50_ttft_ms"] == run["median_ttft_ms"]


def test_warmup_requests_are_not_counted(bench, service):
    result = bench("--num-prompts", 3, "--num-warmups", 2, "--json")
    assert json.loads(result.stdout)["runs"][0]["completed"] == 3
    assert len(generate_requests(service)) == 5
    service.requests.clear()
    bench("--num-prompts", 3, "--num-warmups", 0)
    assert len(generate_requests(service)) == 3


def test_the_request_parameters_reach_the_service(bench, service):
    flags = "--num-prompts 1 --num-warmups 0 --random-input-len 6 --random-output-len 9 "
    flags += "--temperature 0.5 --seed 3 --no-speculation --num-speculative-tokens 2"
    bench(*flags.split(), "--speculation-method", "ngram")
    [request] = generate_requests(service)
    assert len(request.chat.messages[0].content.split()) == 6
    assert request.sampling == pb.SamplingParams(
        temperature=0.5, seed=3, max_tokens=9, ignore_eos=True
    )
    assert request.speculation == pb.SpeculationOptions(
        enabled=False, num_speculative_tokens=2, method=pb.SPECULATION_METHOD_NGRAM
    )


def test_prompts_of_a_file(bench, service, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"Why?"\n{"prompt": "How?"}\n')
    bench("--dataset-path", path, "--output-len", 7, "--num-prompts", 3, "--num-warmups", 0)
    requests = generate_requests(service)
    assert [each.chat.messages[0].content for each in requests] == ["Why?", "How?", "Why?"]
    assert {each.sampling.max_tokens for each in requests} == {7}
    assert {each.sampling.ignore_eos for each in requests} == {False}
    assert requests[0].cache_salt
    bench("--dataset-path", path, "--no-cache-salt", "--ignore-eos", "--num-prompts", 1)
    assert generate_requests(service)[-1].cache_salt == ""
    assert generate_requests(service)[-1].sampling.ignore_eos


def test_an_open_loop_takes_as_long_as_its_arrivals(bench):
    flags = ["--request-rate", 50, "--num-prompts", 20, "--seed", 1]
    [run] = json.loads(bench(*flags, "--json").stdout)["runs"]
    assert (run["request_rate"], run["max_concurrency"]) == (50, None)
    assert run["duration"] > 0.15  # the last is due after 0.4 s on average
    [burst] = json.loads(bench("--request-rate", "inf", "--num-prompts", 3, "--json").stdout)[
        "runs"
    ]
    assert burst["request_rate"] is None


def test_requests_beyond_the_number_of_threads_are_late_in_an_open_loop(bench, monkeypatch):
    monkeypatch.setattr(load, "MAX_THREADS", 2)
    flags = ["--request-rate", "inf", "--num-prompts", 6]
    [run] = json.loads(bench(*flags, "--json").stdout)["runs"]
    assert run["peak_concurrency"] <= 2
    assert run["max_lateness_s"] > 0
    [run] = json.loads(bench("--max-concurrency", 2, "--num-prompts", 6, "--json").stdout)["runs"]
    assert run["max_lateness_s"] == 0, "a closed loop has no arrival times"


@pytest.mark.parametrize(
    ("flags", "label"),
    [
        (["--request-rate", "100,100"], "requests per second"),
        pytest.param(
            ["--request-rate", "100,100", "--max-concurrency", "2"],
            "requests per second",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--request-rate", "100", "--max-concurrency", "2,2"],
            "requests per second",
            marks=pytest.mark.slow,
        ),
        (["--request-rate", "100", "--max-concurrency", "1,2"], "maximum concurrency"),
        pytest.param(["--max-concurrency", "2,2"], "maximum concurrency", marks=pytest.mark.slow),
    ],
)
def test_a_sweep_may_repeat_a_load(bench, tmp_path, flags, label):
    plot = tmp_path / "plot.svg"
    result = bench("--num-prompts", 2, *flags, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert label in plot.read_text()


def test_charts_of_one_run_and_of_several(bench, tmp_path):
    plot = tmp_path / "plot.svg"
    bench("--num-prompts", 5, "--plot", plot)
    one = plot.read_text()
    assert "exceeded by one in N" in one
    bench("--num-prompts", 3, "--request-rate", "100,200", "--plot", plot)
    assert "requests per second" in plot.read_text()
    bench("--num-prompts", 3, "--max-concurrency", "4,1,2", "--plot", plot)
    assert "maximum concurrency" in plot.read_text()
    groups = ElementTree.parse(plot).getroot().iter(f"{SVG}g")
    measured = [each for each in groups if each.get("id", "").startswith("tiny: ")]
    assert len(measured) == 1 + 4 * 5
    x = [float(at.attrib["x"]) for at in measured[0].iter(f"{SVG}use")]  # the points' markers
    assert len(x) == 3
    assert x == sorted(x)


def test_a_plot_needs_matplotlib(bench, service, monkeypatch, tmp_path):
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    result = bench("--plot", tmp_path / "plot.svg")
    assert result.exit_code == 1
    assert result.stderr == "error: --plot needs matplotlib; install specdec[plot]\n"
    assert not service.requests


def test_failures_are_counted_by_kind(bench, service):
    service.error, service.num_errors = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), 2
    result = bench("--num-prompts", 5, "--num-warmups", 0)
    assert result.exit_code == 0
    assert "2 failed" in result.stdout
    assert "errors    2 RESOURCE_EXHAUSTED" in result.stdout


def test_without_a_successful_request_the_command_fails(bench, service):
    service.error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    result = bench("--num-prompts", 2, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["runs"][0]["errors"] == {"RESOURCE_EXHAUSTED": 2}


@pytest.mark.parametrize("flag", ["--output", "--plot"])
def test_a_missing_output_directory_is_an_error_before_any_request(bench, service, flag):
    result = bench(flag, "/no/such/directory/file")
    assert result.exit_code == 1
    assert "it must be in a directory that exists" in result.stderr
    assert not service.requests


def test_an_unreachable_service():
    arguments = ["bench", "serve", "--address", "127.0.0.1:1"]
    result = CliRunner().invoke(main.main, arguments)
    assert result.exit_code == 1
    assert "no service answers at 127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-concurrency", "0"],
        ["--max-concurrency", "1,x"],
        ["--max-concurrency", "2000"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--burstiness", "0"],
        ["--timeout", "0"],
        ["--timeout", "nan"],
        ["--goodput", "ttft"],
        ["--goodput", "speed:3"],
        ["--goodput", "ttft:-1"],
        ["--goodput", "ttft:soon"],
        ["--percentile-metrics", "ttft,speed"],
        ["--metric-percentiles", "101"],
        ["--random-range-ratio", "1"],
        ["--dataset-path", "/no/such/file"],
    ],
)
def test_wrong_usage(bench, service, flags):
    result = bench(*flags)
    assert result.exit_code == 2
    assert flags[1] in result.stderr
    assert "could not convert" not in result.stderr
    assert not service.requests


@pytest.mark.parametrize(
    "given",
    [
        "--backend openai-chat --address 127.0.0.1:1",
        "--backend openai --tls-ca-file {file}",
        "--base-url http://127.0.0.1:1",
        "--model tiny",
        "--output-len 5",
        "--dataset-path {file} --random-input-len 5",
        "--dataset-path {file} --random-output-len 5",
        "--dataset-path {file} --random-range-ratio 0.5",
        "--dataset-path {file} --random-prefix-len 5",
        "--burstiness 2",
        "--burstiness 2 --request-rate inf",
    ],
)
def test_flags_without_effect_are_wrong_usage(tmp_path, given):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"Why?"\n')
    flags = given.format(file=path).split()
    result = CliRunner().invoke(main.main, ["bench", "serve", *flags])
    assert result.exit_code == 2
    assert f"error: {'--burstiness' if '--burstiness' in flags else flags[-2]} has no effect" in (
        result.stderr
    )


@pytest.mark.parametrize("timeout", ["inf", "1e300"])
def test_an_endless_timeout_over_http(timeout):
    flags = ["--backend", "openai-chat", "--base-url", "http://127.0.0.1:1", "--timeout", timeout]
    result = CliRunner().invoke(main.main, ["bench", "serve", *flags])
    assert result.exit_code == 1
    assert "check --base-url" in result.stderr


@pytest.mark.parametrize(
    "flags", [["--max-concurrency", "1,2", "--request-rate", "1,2"], ["--request-rate", "1,inf"]]
)
def test_a_grid_of_loads_is_rejected(bench, service, flags):
    result = bench(*flags)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: request_rate is ")
    assert not service.requests
