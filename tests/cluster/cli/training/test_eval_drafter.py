# Modules: specdec.training.card
"""`specdec eval-drafter` on the tiny model."""

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.cli.training.eval_drafter import _table, _warnings
from specdec.models.drafters.card import read_acceptance
from specdec.training.evaluation import Answer, PositionCounts, SuiteResult
from tests.specdec.heads import fitted_medusa_dir

SPECULATION = {"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold"}


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [{"turns": [f"When will river {n} open?"], "suite": "ab"[n % 2]} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.fixture
def evaluate(tiny_model_dir, prompts_file):
    def run(*arguments, speculation=SPECULATION):
        fixed = ["eval-drafter", prompts_file, "--model", tiny_model_dir, "--kernels", "torch"]
        given = [*fixed, "--speculative-config", json.dumps(speculation), *arguments]
        return CliRunner().invoke(main.main, list(map(str, given)))

    return run


def test_the_report_and_the_plot(evaluate, tmp_path):
    report, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    flags = ["--num-prompts", 1, "--max-tokens", 9, "--temperatures", "0,1"]
    result = evaluate(*flags, "--output", report, "--plot", plot, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content == json.loads(report.read_text())
    cells = [(each["suite"], each["temperature"]) for each in content["results"]]
    assert cells == [("a", 0.0), ("b", 0.0), ("a", 1.0), ("b", 1.0)]
    assert all(each["acceptance_by_position"][0] == 1.0 for each in content["results"])
    assert content["engine"]["speculative_config"]["method"] == "draft_model"
    assert content["evaluation"]["max_tokens"] == 9
    texts = "".join(ElementTree.parse(plot).getroot().itertext())
    assert all(part in texts for part in ("Acceptance length", "position", "temperature 1, none"))
    slower = [each for each in content["results"] if round(each["speedup"], 2) < 1]
    assert result.stderr.count("is slower with drafts") == len(slower)


def test_the_card_keeps_its_other_entries(evaluate, tmp_path):
    card = tmp_path / "card.json"
    card.write_text(json.dumps({"target": "tiny", "evaluation": {"results": []}}))
    flags = ["--num-prompts", 1, "--max-tokens", 9, "--temperatures", "0", "--card", card]
    assert evaluate(*flags).exit_code == 0
    content = json.loads(card.read_text())
    assert content["target"] == "tiny"
    assert content["evaluation"]["method"] == "draft_model"
    assert content["evaluation"]["num_speculative_tokens"] == 3
    assert content["evaluation"]["prompts_file"] == "prompts.jsonl"
    assert "tokens_per_s" not in content["evaluation"]["results"][0]
    suites = read_acceptance(tmp_path)
    assert [each.suite for each in suites] == ["a", "b"]
    assert all(each.accepted_per_step[0] > 0 for each in suites)


@pytest.mark.parametrize("content", ["[]", "[" * 9000], ids=lambda content: content[:30])
def test_a_card_that_is_none_is_refused_first(evaluate, tmp_path, content):
    card = tmp_path / "card.json"
    card.write_text(content)
    result = evaluate("--card", card)
    assert result.exit_code == 1
    assert "a file with a JSON object" in result.stderr
    assert card.read_text() == content


def test_the_table(evaluate):
    result = evaluate("--suites", "b", "--max-tokens", 9, "--temperatures", "0", "--mode", "auto")
    assert result.exit_code == 0, result.output
    heading, line = result.stdout.splitlines()
    assert heading.split()[:4] == ["suite", "temperature", "length", "acceptance"]
    assert line.split()[:2] == ["b", "0"]


def test_the_method_follows_from_the_files_of_a_head(evaluate, tiny_model_dir, tmp_path):
    head = fitted_medusa_dir(tiny_model_dir, tmp_path / "head", [list(range(3, 30))])
    flags = ["--num-prompts", 1, "--max-tokens", 9, "--temperatures", "0", "--json"]
    result = evaluate(*flags, speculation={"model": str(head), "policy": "threshold"})
    assert result.exit_code == 0, result.output
    engine = json.loads(result.stdout)["engine"]
    assert engine["speculative_config"]["method"] == "medusa"
    assert engine["max_num_seqs"] == 4


def test_the_columns_of_the_table_begin_or_end_at_one_place():
    answer = Answer(8, PositionCounts((4, 4), (3, 1)), 30.0, 20.0, is_same=False)
    named = SuiteResult.of("natural_questions", 0.8, [answer])
    unmeasured = SuiteResult.of("", 0.0, [Answer(1, PositionCounts(), None, None, True)])
    heading, line, other = _table([named, unmeasured]).splitlines()
    rates = ["2.00", "50%", "30.0", "20.0", "1.50", "1", "75%", "25%"]
    assert line.split() == ["natural_questions", "0.8", *rates]
    assert other.split() == ["-", "0", "1.00", "0%", "-", "-", "-", "0"]
    assert heading.index("acceptance by") == line.index("75%")
    assert heading.index("other") + len("other") == len(other)


def suite_with(speedup):
    answer = Answer(8, PositionCounts((4,), (1,)), speedup, 1.0, is_same=True)
    return SuiteResult.of("a", 0.8, [answer])


@pytest.mark.parametrize(("speedup", "is_warned"), [(0.5, True), (0.99, True), (0.996, False)])
def test_a_drafter_that_is_slower_than_none_is_warned_of(speedup, is_warned):
    lines = _warnings([suite_with(speedup), suite_with(None), suite_with(1.5)])
    assert len(lines) == is_warned
    assert all("a at temperature 0.8 is slower" in line for line in lines)
    assert all(f"(speed-up {speedup:.2f})" in line for line in lines)


def test_an_unknown_suite_is_reported_in_one_line(evaluate):
    result = evaluate("--suites", "c")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == ["error: suites is 'c'; it must be one of a, b"]
