"""The cases of the benchmark of the default service, and what it compares."""

import pytest

from benchmarks.default_drafter import AUTO, OFF, comparisons, configured, make_cases, parse
from specdec.config.model_aliases import ALIASES

PROMPTS = {"mt_bench": [(1,), (2,)], "humaneval": [(3,), (4,)], "gsm8k": [(5,), (6,)]}


def test_both_settings_run_the_same_prompts():
    single, several = make_cases(PROMPTS, 8)
    for cases in (single, several):
        by_name = {case.name: case for case in cases}
        for name, case in by_name.items():
            kind, _, setting = name.rpartition(", ")
            other = {AUTO: OFF, OFF: AUTO}[setting]
            assert case.workloads == by_name[f"{kind}, {other}"].workloads
    assert [work.prompts for work in single[0].workloads] == [((1,),), ((2,),)]


def test_several_streams_run_all_suites_in_turn():
    _, several = make_cases(PROMPTS, 8)
    first = several[0].workloads[0]
    assert first.num_open == 4
    assert first.prompts == ((1,), (3,), (5,), (2,))


@pytest.mark.parametrize(("quantization", "aim"), [("none", 1.5), ("int8", 1.3), ("w8a8", None)])
def test_every_comparison_is_of_measured_cases(quantization, aim):
    single, several = make_cases(PROMPTS, 8)
    names = {case.name for case in (*single, *several)}
    found = comparisons(quantization)
    assert {name for each in found for name in (*each.above, *each.below)} == names
    assert [each.aim for each in found] == [aim] * 3 + [0.98] * 3


def test_a_named_drafter_is_one_of_the_models():
    config = configured(parse(["--drafter", "draft", "--quantization", "int8"]))
    drafters = {each.method: each for each in ALIASES[config.model].drafters}
    draft = drafters["colocated_draft_model"]
    assert config.speculative_config.to_mapping()["model"] == draft.name
    assert not config.speculative_config.is_auto
    assert configured(parse([])).speculative_config.is_auto


def test_a_quantization_has_a_separate_report():
    assert parse([]).output.name == "default-drafter.json"
    assert parse(["--quantization", "int8"]).output.name == "default-drafter-int8.json"
    assert parse(["--quantization", "int8", "--output", "here.json"]).output.name == "here.json"
