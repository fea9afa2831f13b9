"""`specdec bench methods` against a fake service."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.cli.bench.cli import _table
from cluster.cli.bench.methods import MethodReport, MethodResult, _tokens_per_s
from protos.specdec.v1 import inference_pb2 as pb
from tests.specdec.client.fake_service import FakeService, running


@pytest.fixture
def service():
    with running(FakeService()) as service:
        yield service


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = ['"Why?"', '{"prompt": "How?"}', "", '{"id": 3, "turns": ["When?", "And then?"]}']
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def bench(service):
    def run(*arguments):
        arguments = ["bench", "methods", "--address", service.address, *map(str, arguments)]
        return CliRunner().invoke(main.main, arguments)

    return run


def is_measured(request):
    return isinstance(request, pb.GenerateRequest) and request.sampling.max_tokens == 9


def variant_of(speculation):
    if speculation.HasField("enabled"):
        return "on" if speculation.enabled else "off"
    return pb.SpeculationMethod.Name(speculation.method).removeprefix("SPECULATION_METHOD_")


def test_each_prompt_is_sent_with_every_variant_in_rotating_order(bench, service, prompts_file):
    result = bench(prompts_file, "--max-tokens", "9")
    assert result.exit_code == 0
    measured = [each for each in service.requests if is_measured(each)]
    named = [(each.chat.messages[0].content, variant_of(each.speculation)) for each in measured]
    variants = ["off", "NGRAM", "DRAFT_MODEL", "UNSPECIFIED"]
    assert named == [
        (prompt, variants[(first + index) % 4])
        for first, prompt in enumerate(["Why?", "How?", "When?"])
        for index in range(4)
    ]


def test_variants_do_not_share_a_prefix_cache(bench, service, prompts_file):
    assert bench(prompts_file, "--max-tokens", "9").exit_code == 0
    measured = [each for each in service.requests if is_measured(each)]
    salts = {variant_of(each.speculation): each.cache_salt for each in measured}
    assert all(salts[variant_of(each.speculation)] == each.cache_salt for each in measured)
    assert len(set(salts.values())) == len(salts) == 4
    generated = [each for each in service.requests if isinstance(each, pb.GenerateRequest)]
    warmup = [each for each in generated if each.sampling.max_tokens == 1]
    assert [each.cache_salt for each in warmup] == [each.cache_salt for each in measured]


def test_the_report_as_text_and_as_json(bench, prompts_file, tmp_path):
    output, plot = tmp_path / "report.json", tmp_path / "report.svg"
    flags = ["--num-prompts", "2", "--output", output, "--plot", plot]
    report = json.loads(bench(prompts_file, *flags, "--json").stdout)
    assert json.loads(output.read_text()) == report
    assert (report["model"], report["num_prompts"], report["max_tokens"]) == ("tiny", 2, 128)
    names = ["off", "ngram", "draft_model", "as configured"]
    assert [each["name"] for each in report["results"]] == names
    for each in report["results"]:
        assert each["tokens_per_s"] > 0
        assert each["speedup"] > 0
        assert each["num_other_answers"] == 0
        assert (each["num_drafts"], each["num_tokens"]) == (4, 6)
        assert (each["acceptance_rate"], each["mean_acceptance_length"]) == (0.5, 2.5)
    lines = bench(prompts_file).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == names
    texts = [each.text for each in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("acceptance length 2.50") == len(names)
    assert [text for text in texts if text in names] == names


def test_the_columns_of_the_table_begin_or_end_at_one_place():
    off = MethodResult("off", 20.0, 1.0, 0.0, 1.0, 0, 12, 0)
    drafts = MethodResult("colocated_draft_model", None, None, 0.5, 2.5, 4, 12, 1)
    heading, *lines = _table(MethodReport("tiny", 1, 8, 0.0, (off, drafts))).splitlines()
    assert [line.split() for line in lines] == [
        ["off", "20.0", "1.00", "-", "-", "0", "0"],
        ["colocated_draft_model", "-", "-", "50%", "2.50", "4", "1"],
    ]
    assert {len(heading), *map(len, lines)} == {len(heading)}
    assert heading.index("tokens/s") > len("colocated_draft_model")


def test_a_completion_without_a_token_has_no_rate():
    usage = SimpleNamespace(completion_tokens=0)
    result = SimpleNamespace(chunks=[], usage=usage, total_s=1.0, first_token_s=0.5)
    assert _tokens_per_s(result) is None


@pytest.mark.parametrize("line", ["Why?", '{"question": "Why?"}', '""', '{"turns": []}', "[1]"])
def test_an_invalid_line_of_prompts_is_an_error(bench, service, tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"Why?"\n{line}\n')
    result = bench(path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {path} line 2 is ")
    assert not service.requests


def test_a_file_without_prompts_is_an_error(bench, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    assert "it must be a JSON lines file" in bench(path).stderr
