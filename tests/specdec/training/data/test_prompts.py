"""Prompts files and the selection of suites."""

import pytest

from specdec.training.data.prompts import PromptRecord, read_prefixes, read_prompts, select_prompts
from specdec.types.errors import InvalidValueError

LINES = ['"Why?"', '{"prompt": "How?", "suite": "a"}', "", '{"turns": ["When?", "And then?"]}']


def test_each_form_of_a_line_is_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(LINES))
    assert read_prompts(path) == [
        PromptRecord(("Why?",)),
        PromptRecord(("How?",), "a"),
        PromptRecord(("When?", "And then?")),
    ]


def test_a_prompt_may_have_unicode_line_separators(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('"One\u2028two"\r\n"Three\u2029four\x85"\n'.encode())
    turns = [each.turns for each in read_prompts(path)]
    assert turns == [("One\u2028two",), ("Three\u2029four\x85",)]


@pytest.mark.parametrize(
    "line",
    [
        *("Why?", "3", "{}", '{"turns": []}', '{"turns": [1]}', '{"prompt": "a", "suite": 1}'),
        *("[" * 9000, "9" * 5000),
    ],
    ids=lambda line: line[:30],
)
def test_another_content_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{LINES[0]}\n{line}\n")
    with pytest.raises(InvalidValueError, match="line 2"):
        read_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="readable"):
        read_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidValueError, match="at least one prompt"):
        read_prompts(tmp_path / "empty.jsonl")


def test_the_first_prompts_of_each_suite_are_selected():
    prompts = [PromptRecord((str(n),), "ab"[n % 2]) for n in range(6)]
    assert select_prompts(prompts, (), None) == prompts[::2] + prompts[1::2]
    assert select_prompts(prompts, (), 1) == prompts[:2]
    assert select_prompts(prompts, ("b",), 2) == [prompts[1], prompts[3]]
    with pytest.raises(InvalidValueError, match="one of a, b"):
        select_prompts(prompts, ("c",), 1)


def test_prefixes_are_one_string_a_line(tmp_path):
    path = tmp_path / "prefixes.jsonl"
    path.write_text('"Write a"\n"def f(\\n"\n')
    assert read_prefixes(path) == ("Write a", "def f(\n")
    path.write_text('"Write a"\n{"turns": ["When?", "And then?"]}\n')
    with pytest.raises(InvalidValueError, match="one string a line"):
        read_prefixes(path)
    path.write_text("")
    with pytest.raises(InvalidValueError, match=r"^prompt_prefixes is "):
        read_prefixes(path)
