# Modules: cluster.api.openai.answer_reading
"""Reasoning is separated from the answer, however the text is split."""

import json
from typing import get_args

import pytest

from cluster.api.openai.answer_reading import (
    HARMONY,
    AnswerReader,
    AnswerReading,
    answer_reading,
)
from cluster.api.openai.conversation import ToolUse
from cluster.api.openai.parsers.harmony import HarmonyParser
from cluster.api.openai.parsers.pieces import CallArguments, Content, PlainParser, Reasoning
from cluster.api.openai.parsers.reasoning import SYNTAXES, ReasoningParser
from cluster.api.openai.parsers.tool_format import HERMES, TOOL_FORMATS
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.config.serve_config import ReasoningParserName
from cluster.replica.preprocessor import TokenTexts
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason
from tests.cluster.api.openai.family_outputs import FAMILIES, OUTPUTS, TOOLS, Output
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
    "gemma4": [lambda body, answer: f"<|channel>thought\n{body}\n<channel|>{answer}"],
    "seed_oss": [lambda body, answer: f"<seed:think>{body}</seed:think>\n{answer}"],
}
CASES = [(family, write) for family, writers in WRITERS.items() for write in writers]


def parser_of(family):
    return ReasoningParser(SYNTAXES[family], PlainParser)


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


MARKS = {name: (syntax.openings[0], syntax.closings[0]) for name, syntax in SYNTAXES.items()}
PROMPTS = {
    "opens": ["{open}", "{open}\n", "{close}\n\n{open}\n"],
    "closes": ["{open}\n\n{close}\n\n", "{close}", "{open}{close}"],
    "has no mark": [""],
    "is within the reasoning": ["{open}\nOkay", "{close}a{open} Okay"],
    "is within the answer": ["{open}a{close}So", "{close}So", "So"],
}
INSIDE, OUTSIDE = ("", "Two."), ("Two.", "")
READ = {  # content and reasoning after each prompt, of what the model writes
    "Two.{close}Four.": {
        "opens": ("Four.", "Two."),
        "closes": ("Two.{close}Four.", ""),
        "has no mark": {"deepseek_r1": ("Four.", "Two."), "": ("Two.{close}Four.", "")},
        "is within the reasoning": ("Four.", "Two."),
        "is within the answer": ("Two.{close}Four.", ""),
    },
    "{open}Two.{close}Four.": {
        **dict.fromkeys(("opens", "closes", "has no mark"), ("Four.", "Two.")),
        "is within the reasoning": ("Four.", "{open}Two."),
        "is within the answer": ("{open}Two.{close}Four.", ""),
    },
    "{close}Four.": {
        **dict.fromkeys(
            ("opens", "closes", "has no mark", "is within the reasoning"), ("Four.", "")
        ),
        "is within the answer": ("{close}Four.", ""),
    },
    "Two.": {
        **dict.fromkeys(("opens", "is within the reasoning"), INSIDE),
        **dict.fromkeys(("closes", "is within the answer"), OUTSIDE),
        "has no mark": {"deepseek_r1": INSIDE, "": OUTSIDE},
    },
    "{open}Two.": {
        **dict.fromkeys(("opens", "closes", "has no mark"), INSIDE),
        "is within the reasoning": ("", "{open}Two."),
        "is within the answer": ("{open}Two.", ""),
    },
}


@pytest.mark.parametrize("family", SYNTAXES)
@pytest.mark.parametrize("shown", PROMPTS)
@pytest.mark.parametrize("written", READ)
def test_the_prompt_decides_whether_an_answer_begins_in_reasoning(family, shown, written):
    """The configured family decides only where the prompt has no mark."""
    opening, closing = MARKS[family]
    expected = READ[written][shown]
    if isinstance(expected, dict):
        expected = expected.get(family, expected[""])
    text, *whole = (each.format(open=opening, close=closing) for each in (written, *expected))
    for start in PROMPTS[shown]:
        prefix = start.format(open=opening, close=closing)
        reading = AnswerReading(None, family, prefix=prefix)
        assert read(reading.parser(), [text]) == (*whole, []), prefix
        assert read(reading.parser(), text) == (*whole, []), f"{prefix}, character by character"


@pytest.mark.parametrize("family", SYNTAXES)
def test_a_cut_text_is_open_as_its_parser_reads_it(family):
    opening, closing = MARKS[family]
    for text, after_opening, after_closing in (
        ("Two", True, False),
        (f"{opening}Two", True, True),
        (f"Two{closing}", False, False),
        (f"{opening}Two{closing}Four", False, False),
        (opening[:3], True, True),
    ):
        assert SYNTAXES[family].after(opening).is_open(text) == after_opening, text
        assert SYNTAXES[family].after(f"{opening}a{closing}").is_open(text) == after_closing, text


def test_whitespace_between_a_beginning_and_its_rest_is_kept():
    reading = AnswerReading(None, "qwen3", prefix="<think>\nI think that ")
    assert read(reading.parser(), " it is.\n</think>\n\nYes.") == ("Yes.", " it is.", [])


def test_gpt_oss_continues_the_message_that_the_prompt_begins():
    for prefix, content, reasoning in (
        ("<|start|>assistant<|channel|>analysis<|message|>We", "Four.", " add."),
        ("<|start|>assistant<|channel|>final<|message|>So", " add.Four.", ""),
    ):
        parser = AnswerReading(None, HARMONY, prefix=prefix).parser()
        text = " add.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
        assert read(parser, text) == (content, reasoning, [])


def test_all_choices_continue_a_beginning_that_is_parsed_once(monkeypatch):
    parsed = []
    feed = HarmonyParser.feed
    monkeypatch.setattr(HarmonyParser, "feed", lambda *args: parsed.append(args[1]) or feed(*args))
    begun = "<|channel|>analysis<|message|>We"
    reading = AnswerReading(None, HARMONY, prefix=f"<|start|>assistant{begun}")
    parsers = [reading.parser() for _ in range(3)]
    assert parsed == [begun]
    texts = [" add.", " see.<|end|>", "<|end|><|start|>assistant<|channel|>final<|message|>Yes."]
    read_texts = [read(parser, [text]) for parser, text in zip(parsers, texts, strict=True)]
    assert read_texts == [("", " add.", []), ("", " see.", []), ("Yes.", "", [])]


def test_marks_that_show_how_an_answer_begins():
    assert AnswerReading(None, None).marks == ()
    assert AnswerReading(None, "qwen3").marks == ("<think>", "</think>")
    assert AnswerReading(None, HARMONY).marks == ("<|start|>assistant",)


def outputs_of(parts):
    """Return outputs for lists of tokens' texts."""
    made = [
        EngineOutput(
            "r",
            tuple(range(len(part))),
            "".join(part),
            None,
            num_prompt_tokens=1,
            num_output_tokens=0,
            speculation=SpeculationStats(),
            text_lengths=tuple(map(len, part)),
        )
        for part in parts
    ]
    return [*made[:-1], made[-1]._replace(finish_reason=FinishReason.STOP)]


HARMONY_TOKENS = ["<|channel|>", "analysis", "<|message|>", "We", " add", "<|end|>", "<|start|>"]


@pytest.mark.parametrize(
    ("family", "prefix", "tokens", "count"),
    [
        ("qwen3", "<think>", ["I", " see", ".", "</think>", "\n\n", "Yes", ""], 4),
        ("qwen3", "<think>\nI", [" see", "\n</", "think", ">\n\nYes", "."], 4),
        ("qwen3", "", ["<think>", "I", " see", "</think>", "Yes", ""], 4),
        ("qwen3", "", ["<think>", "", "I", "", " see"], 5),
        ("qwen3", "", ["I", " see", ".", "</think>"], 0),
        ("qwen3", "</think>", ["I", " see", "."], 0),
        ("qwen3", "</think>", ["<th", "at"], 0),
        ("deepseek_r1", "", ["I", " see", ".", "</think>", "Yes", ""], 4),
        (
            HARMONY,
            "",
            [*HARMONY_TOKENS, "assistant", "<|channel|>", "final", "<|message|>", "8"],
            6,
        ),
        (HARMONY, "", HARMONY_TOKENS[:5], 5),
        (None, "", ["<think>", "I"], 0),
    ],
)
def test_tokens_of_reasoning_are_counted_with_their_marks(family, prefix, tokens, count):
    reading = AnswerReading(None, family, includes_reasoning=False, prefix=prefix)
    middle = len(tokens) // 2
    for parts in ([tokens], [[token] for token in tokens], [tokens[:middle], tokens[middle:]]):
        reader = AnswerReader(reading)
        for output in outputs_of(parts):
            reader.read(output)
        assert reader.num_reasoning_tokens == count, parts


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
        "model_form": form,
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


@pytest.mark.parametrize("family", ["hermes", "mistral", HARMONY])
def test_arguments_are_json_where_the_model_does_not_escape_strings(family):
    name, write = FAMILIES[family]
    reasoning = HARMONY if family == HARMONY else None
    text = write(Output("", (("get_weather", {"city": "A", "unit": "B"}),)))
    text = text.replace('"A"', '"C:\\users"').replace('"B"', '"\n"')
    for num_resumed, tokens in (
        (0, [text]),
        *((place, [*text]) for place in (0, text.index("C:"))),
    ):
        reader = AnswerReader(AnswerReading(use(TOOL_FORMATS[name]), reasoning))
        received = tokens[:num_resumed]
        reader.resume(TokenTexts("".join(received), (1,) * num_resumed))
        pieces = [
            piece
            for output in outputs_of([[each] for each in tokens[num_resumed:]])
            for piece in reader.read(output)
        ]
        arguments = "".join(each.text for each in pieces if isinstance(each, CallArguments))
        begun = '{"city": "' if num_resumed else ""
        assert json.loads(begun + arguments) == {"city": "C:\\users", "unit": "\n"}


def request(**changes):
    return ChatRequest(messages=[{"role": "user", "content": "a"}], **changes)


def reading_of(parser, tools=None, special=(), **changes):
    form = tools.model_form if tools else changes.pop("form", HERMES)
    return answer_reading(request(**changes), tools, form, parser, lambda text: text in special)


def test_marks_that_are_special_tokens_are_shown():
    assert not reading_of("qwen3").shows_special_tokens
    assert reading_of("qwen3", special=("<think>",)).shows_special_tokens
    harmony = use(TOOL_FORMATS["gpt_oss"])
    assert reading_of("none", harmony, special=("<|channel|>",)).reasoning == "gpt_oss"
    assert reading_of("none", harmony, special=("<|channel|>",)).shows_special_tokens
    assert reading_of("gpt_oss", special=("<|channel|>",)).shows_special_tokens


def test_harmony_is_read_wherever_the_template_has_it():
    """Without tools and without a parser of reasoning, too: the text would be the bare words."""
    reading = reading_of("none", form=TOOL_FORMATS["gpt_oss"], special=("<|channel|>",))
    assert reading.shows_special_tokens
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    assert read(reading.parser(), text) == ("Hi", "Hm.", [])
    structured = {"response_format": {"type": "json_object"}}
    assert reading_of("none", form=TOOL_FORMATS["gpt_oss"], **structured).is_plain


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
