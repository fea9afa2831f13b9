"""Aims of the comparisons of one stream."""

import json
from collections import Counter

from benchmarks import single_stream
from benchmarks.prompts import DEFAULT_PATH, SUITES, BenchmarkPrompt, by_suite, load_prompts
from specdec.text.tokenizer import Tokenizer


def test_aims_of_single_streams():
    aims = {
        each.name: each.aim
        for each in single_stream.comparisons(
            ["edit", "gsm8k"], ["none", "ngram", "draft_model", "auto"]
        )
    }
    assert aims == {
        "ngram / none, edit": 1.3,
        "draft_model / none, edit": None,
        "auto / none, edit": 0.97,
        "ngram / none, gsm8k": None,
        "draft_model / none, gsm8k": None,
        "auto / none, gsm8k": 0.97,
    }


def test_questions_of_spec_bench_are_suites_by_category(tmp_path, tiny_model_dir):
    questions = [(81, "writing"), (82, "math"), (161, "translation"), (162, "translation")]
    path = tmp_path / "question.jsonl"
    records = (
        {"question_id": number, "category": category, "turns": [f"Question {number}", "More."]}
        for number, category in questions
    )
    path.write_text("\n".join(map(json.dumps, records)))
    found = load_prompts(path, Tokenizer(tiny_model_dir))
    assert [each.suite for each in found] == ["mt_bench", "mt_bench", "translation", "translation"]
    assert [each.prompt_id for each in found] == ["81", "82", "161", "162"]
    assert by_suite(found, ["translation"], 9)["translation"] == [
        each.token_ids for each in found[2:]
    ]


def test_the_prompts_of_the_package_are_ten_of_each_suite(tiny_model_dir):
    found = load_prompts(DEFAULT_PATH, Tokenizer(tiny_model_dir))
    assert Counter(each.suite for each in found) == dict.fromkeys(SUITES, 10)


def test_the_prompts_of_a_suite_are_at_equal_distances():
    prompts = [BenchmarkPrompt(str(index), "mt_bench", (index,)) for index in range(80)]
    assert by_suite(prompts, ["mt_bench"], 4) == {"mt_bench": [(0,), (20,), (40,), (60,)]}
