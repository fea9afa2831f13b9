# Modules: cluster.api.openai.parsers.reasoning
"""Calls at the end of reasoning, without the mark that closes it."""

import pytest

from cluster.api.openai.answer_reading import HARMONY, AnswerReader, AnswerReading
from cluster.api.openai.parsers.call_syntax import SYNTAXES
from cluster.api.openai.parsers.pieces import Reasoning
from cluster.api.openai.parsers.tool_families import call_marks_of
from cluster.api.openai.parsers.tool_format import HERMES, TOOL_FORMATS
from tests.cluster.api.openai.family_outputs import CALLS_OR_TEXT, FAMILIES, OUTPUTS, Output
from tests.cluster.api.openai.parsers.test_reasoning import outputs_of, use
from tests.cluster.api.openai.parsers.test_tool_families import read

MARKED = [family for family, (name, _) in FAMILIES.items() if name not in (HARMONY, *CALLS_OR_TEXT)]


@pytest.mark.parametrize("family", MARKED)
def test_calls_at_the_end_of_reasoning_without_an_end(family):
    """Some models leave out the closing mark before calls."""
    name, write = FAMILIES[family]
    reading = AnswerReading(use(TOOL_FORMATS[name]), "deepseek_r1")
    text = f"Look up.\n{write(Output('', OUTPUTS[21].calls))}"
    splits = [[text], text, *([text[:end], text[end:]] for end in range(1, len(text), 3))]
    for parts in splits:
        content, reasoning, calls = read(reading.parser(), parts)
        assert (content, reasoning) == ("", "Look up.")
        assert [name for name, _ in calls] == ["get_weather", "time"]
    assert read(reading.parser(), [text], is_cut=True) == ("", text.strip(), [])
    for rest, answer in (("</think>No.", "No."), ("\nNo.", "")):
        whole = (answer, f"{text.strip()}{'' if answer else rest}", [])
        for parts in ([text, rest], [f"{text}{rest}"], f"{text}{rest}"):
            assert read(reading.parser(), parts) == whole


@pytest.mark.parametrize("family", MARKED)
def test_the_mark_of_a_call_in_reasoning_withholds_no_other_text(family):
    form = TOOL_FORMATS[FAMILIES[family][0]]
    marks = call_marks_of(form)
    syntax = SYNTAXES.get(form.name)
    if syntax is not None and syntax.has_objects:
        marks += tuple(f"{each}{{" for each in marks)
    for mark in marks:
        parser = AnswerReading(use(form), "deepseek_r1").parser()
        texts = ["I know ", mark, " that", " it", " calls"]
        shown = [list(parser.feed(each)) for each in texts]
        assert shown[0] == [Reasoning("I know")]
        assert "".join(each.text for pieces in shown for each in pieces) == "".join(texts), mark
        assert shown[-1] == [Reasoning(" calls")]


@pytest.mark.parametrize(("end", "count"), [("", 3), (" I", 7), ("</think>", 7)])
def test_tokens_of_calls_at_the_end_of_reasoning_are_not_counted(end, count):
    call = ["<tool_call>", '{"name": "time", "arguments": {}}', "</tool_call>"]
    tokens = ["I", " see", ".\n", *call, end]
    check_count(tokens, count)


def test_tokens_without_text_before_a_call_are_not_counted():
    tokens = ["", "I", "", " see", "", "", "<tool_", "call>", '{"name": "time", "arguments": {}}']
    check_count([*tokens, "</tool_call>"], 4)


def check_count(tokens, count):
    """Compare the number of tokens of the reasoning, which come at once, one by one, or in two."""
    for parts in ([tokens], [[token] for token in tokens], [tokens[:4], tokens[4:]]):
        reader = AnswerReader(AnswerReading(use(HERMES), "deepseek_r1"))
        for output in outputs_of(parts):
            reader.read(output)
        assert reader.num_reasoning_tokens == count, parts
