# Modules: cluster.api.openai.answer_reading
"""Reasoning is separated from the answer, however the text is split."""

from typing import get_args

import pytest

from cluster.api.openai.answer_reading import HARMONY, AnswerReading, answer_reading
from cluster.api.openai.conversation import ToolUse
from cluster.api.openai.parsers.pieces import Content, PlainParser, Reasoning
from cluster.api.openai.parsers.reasoning import SYNTAXES, ReasoningParser
from cluster.api.openai.parsers.tool_format import HERMES, TOOL_FORMATS
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.config.serve_config import ReasoningParserName
from tests.cluster.api.openai.family_outputs import FAMILIES, OUTPUTS, TOOLS
from tests.cluster.api.openai.parsers.test_tool_families import read

BODIES = (
    "One thought.",
    "Two\n\nparagraphs.",
    "a < b, and </thin is no mark",
    "What if the user writes <think>?",
    "{[(",
    "東京 🌦",
)
ANSWERS = ("It rains.", "First.\n\nSecond.", "1 < 2", "```\ncode\n```\n", "")
OUTPUTS_WITH_REASONING = [(body, answer) for body in BODIES for answer in ANSWERS]
"""Thirty, as texts of reasoning and answer."""

WRITERS = {
    "deepseek_r1": [
        lambda body, answer: f"{body}\n</think>\n\n{answer}",
        lambda body, answer: f"<think>\n{body}\n</think>\n\n{answer}",
    ],
    "qwen3": [lambda body, answer: f"<think>\n{body}\n</think>\n\n{answer}"],
    "granite": [
        lambda body, answer: f"Here is my thought process:\n{body}\nHere is my response:\n{answer}",
        lambda body, answer: f"Here's my thought process: {body} Here's my response: {answer}",
    ],
}
CASES = [(family, write) for family, writers in WRITERS.items() for write in writers]


def parser_of(family):
    return ReasoningParser(SYNTAXES[family], PlainParser())


@pytest.mark.parametrize(("family", "write"), CASES)
@pytest.mark.parametrize(("body", "answer"), OUTPUTS_WITH_REASONING)
def test_an_output_is_read_alike_however_it_is_split(family, write, body, answer):
    text = write(body, answer)
    whole = (answer, body, [])
    assert read(parser_of(family), [text]) == whole
    assert read(parser_of(family), text) == whole, "character by character"
    for end in range(1, len(text)):
        assert read(parser_of(family), [text[:end], text[end:]]) == whole, end


@pytest.mark.parametrize(
    ("family", "text", "content", "reasoning"),
    [
        ("qwen3", "No reasoning.", "No reasoning.", ""),
        ("qwen3", "<think>\n\n</think>\n\nShort.", "Short.", ""),
        ("qwen3", "<think>It was cut", "", "It was cut"),
        ("deepseek_r1", "It was cut", "", "It was cut"),
        ("deepseek_r1", "\n</think>\nShort.", "Short.", ""),
        ("granite", "Here is my answer.", "Here is my answer.", ""),
        ("granite", "Here is my thou", "Here is my thou", ""),
        ("qwen3", "  ", "  ", ""),
    ],
)
def test_outputs_without_an_end_or_without_reasoning(family, text, content, reasoning):
    assert read(parser_of(family), [text]) == (content, reasoning, [])
    assert read(parser_of(family), text) == (content, reasoning, [])


@pytest.mark.parametrize(
    ("family", "prefix", "content", "reasoning"),
    [
        ("deepseek_r1", "The answer", " is 4.", ""),
        ("deepseek_r1", "<think>a</think>The answer", " is 4.", ""),
        ("deepseek_r1", "<think>Two and two", "Four.", "make four."),
        ("qwen3", "<think>Two and two", "Four.", "make four."),
        ("qwen3", "The answer", " is 4.", ""),
        ("deepseek_r1", "", "Four.", "make four."),
    ],
)
def test_an_answer_continues_its_beginning_in_the_prompt(family, prefix, content, reasoning):
    text = f"{reasoning}</think>{content}" if reasoning else content
    parser = AnswerReading(None, family, prefix=prefix).parser()
    assert read(parser, text) == (content, reasoning, [])


def test_every_parser_of_the_configuration_is_tested():
    assert set(get_args(ReasoningParserName)) == {"none", HARMONY, *SYNTAXES}
    assert set(WRITERS) == set(SYNTAXES)


def test_reasoning_is_passed_on_as_it_arrives():
    parser = parser_of("qwen3")
    assert list(parser.feed("<think>\nLet me")) == [Reasoning("Let me")]
    assert list(parser.feed(" see.\n</th")) == [Reasoning(" see.")]


def use(form, **changes):
    values = {
        "tools": TOOLS,
        "callable": TOOLS,
        "form": form,
        "structure": None,
        "is_forced": False,
        "is_parallel": True,
        "shows_special_tokens": False,
    }
    return ToolUse(**{**values, **changes})


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm45"])
def test_calls_follow_reasoning(family):
    name, write = FAMILIES[family]
    reading = AnswerReading(use(TOOL_FORMATS[name]), "qwen3")
    text = f"<think>\nLook up.\n</think>\n\n{write(OUTPUTS[21])}"
    content, reasoning, calls = read(reading.parser(), text)
    assert (content, reasoning) == (OUTPUTS[21].before, "Look up.")
    assert [name for name, _ in calls] == ["get_weather", "time"]


def request(**changes):
    return ChatRequest(messages=[{"role": "user", "content": "a"}], **changes)


def reading_of(parser, tools=None, special=(), **changes):
    return answer_reading(request(**changes), tools, parser, lambda text: text in special)


def test_a_grammar_leaves_no_place_for_reasoning():
    assert reading_of("qwen3").reasoning == "qwen3"
    assert reading_of("none").reasoning is None
    for changes in (
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a"},
        {"structured_outputs": {"choice": ["a"]}},
    ):
        assert reading_of("deepseek_r1", **changes).reasoning is None
    assert reading_of("qwen3", response_format={"type": "text"}).reasoning == "qwen3"
    assert reading_of("qwen3", use(HERMES, is_forced=True)).reasoning is None


def test_marks_that_are_special_tokens_are_shown():
    assert not reading_of("qwen3").shows_special_tokens
    assert reading_of("qwen3", special=("<think>",)).shows_special_tokens
    harmony = use(TOOL_FORMATS["gpt_oss"])
    assert reading_of("none", harmony, special=("<|channel|>",)).reasoning == "gpt_oss"
    assert reading_of("none", harmony, special=("<|channel|>",)).shows_special_tokens
    assert reading_of("gpt_oss", special=("<|channel|>",)).shows_special_tokens


def wanted(reading, text):
    pieces = reading.parser()
    return [*reading.wanted([*pieces.feed(text), *pieces.finish()])]


def test_reasoning_is_left_out_on_request():
    reading = reading_of("qwen3", include_reasoning=False)
    assert wanted(reading, "<think>a</think>b") == [Content("b")]


def test_calls_after_the_first_are_left_out_on_request():
    _, write = FAMILIES["kimi_k2"]
    reading = AnswerReading(use(TOOL_FORMATS["kimi_k2"], is_parallel=False), None)
    assert {each.index for each in wanted(reading, write(OUTPUTS[22]))} == {0}
