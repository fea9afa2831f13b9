# Modules: cluster.api.openai.parsers.unique_calls, cluster.api.openai.forced_calls
"""A list of forced calls ends at the first repeated one."""

import pytest

from cluster.api.openai.answer_reading import AnswerReading
from cluster.api.openai.builders import matched_stop
from cluster.api.openai.conversation import ToolUse
from cluster.api.openai.forced_calls import until_repeated
from cluster.api.openai.parsers.pieces import CallArguments, CallStart
from cluster.api.openai.parsers.tool_families import tool_parser
from cluster.api.openai.parsers.tool_format import HERMES, Tool
from cluster.api.openai.parsers.unique_calls import UniqueCalls
from cluster.api.openai.streams import PromptOutput
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason
from tests.cluster.api.openai.parsers.test_tool_families import read

TOOLS = (Tool("a"), Tool("b"))


def texts(*calls):
    return "\n".join(HERMES.write(name, {"x": given}) for name, given in calls)


def parser():
    return UniqueCalls(tool_parser(HERMES, TOOLS, is_constrained=True))


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([("a", 1)] * 3, 1),
        ([("a", 1), ("a", 12), ("b", 1)], 3),
        ([("a", 1), ("b", 1), ("a", 1), ("b", 2)], 2),
        ([("a", 12), ("a", 1), ("a", 123), ("a", 12)], 3),
    ],
)
def test_calls_up_to_a_repeated_one(calls, kept):
    text = texts(*calls)
    expected = [(name, f'{{"x": {given}}}') for name, given in calls[:kept]]
    assert read(parser(), [text]) == ("", "", expected)
    for end in range(1, len(text), 3):
        made = parser()
        assert read(made, [text[:end], text[end:]]) == ("", "", expected), end
        assert made.has_ended is (kept < len(calls))
    assert read(parser(), text) == ("", "", expected)


def test_arguments_that_repeat_none_are_passed_on_as_they_arrive():
    made = parser()
    assert len(list(made.feed(texts(("a", 1))))) == 2
    assert list(made.feed('\n<tool_call>\n{"name": "a", "arguments": {"x": ')) == []
    assert list(made.feed("2")) == [
        CallStart(1, "a"),
        CallArguments(1, '{"x": '),
        CallArguments(1, "2"),
    ]


def test_what_is_cut_within_a_possible_repetition_is_no_call():
    text = texts(("a", 1), ("a", 12))
    cut = text[: text.rindex("2")]
    assert read(parser(), [cut], is_cut=True)[2] == [("a", '{"x": 1}')]
    assert len(read(parser(), [cut])[2]) == 2


def reading(reasoning=None):
    tools = ToolUse(TOOLS, TOOLS, HERMES, None, True, True, False, HERMES)
    return AnswerReading(tools, reasoning, is_constrained=True)


def output(text, choice=0, reason=None):
    return EngineOutput("r", (1,), text, reason, 3, 5, SpeculationStats(), choice=choice)


def ignored(*_):
    pass


async def outputs(closed, *given):
    try:
        for each in given:
            yield PromptOutput(0, each)
    finally:
        closed.append(True)


async def test_generation_ends_once_no_choice_goes_on():
    one, closed = texts(("a", 1)), []
    given = [
        output(one, 0),
        output(one, 1),
        output(f"\n{one}", 0),
        output("\n", 0),
        output("", 1, FinishReason.STOP),
        output("never", 0),
    ]
    found, ends = [], []

    def on_end(each, longest):
        ends.append((each.choice, each.is_last, each.num_output_tokens, longest))

    async for each in until_repeated(outputs(closed, *given), reading(), 2, on_end):
        found.append(each.output)
        assert closed == [True] * each.output.is_last, "nothing comes after the end"
    assert [(each.choice, each.finish_reason) for each in found] == [
        (0, None),
        (1, None),
        (0, None),
        (0, FinishReason.STOP),
        (1, FinishReason.STOP),
    ]
    assert [each.is_last for each in found] == [False, False, False, False, True]
    assert [each.num_output_tokens for each in found] == [1, 2, 3, 3, 4]
    assert ends == [(0, False, 3, 2), (1, True, 4, 2)]


async def test_a_limit_of_length_at_a_repeated_call_is_none():
    given = output(texts(("a", 1), ("a", 1)), 0, FinishReason.LENGTH)
    ended = until_repeated(outputs([], given), reading(), 1, ignored)
    cut, end = [each.output async for each in ended]
    assert (cut.finish_reason, cut.is_last) == (None, False)
    assert (end.finish_reason, end.is_last) == (FinishReason.STOP, True)


@pytest.mark.parametrize("interval", [1, 2, 5, 16, 400])
@pytest.mark.parametrize("parser", [None, "qwen3"])
async def test_an_answer_ends_at_the_same_token_however_many_an_output_has(interval, parser):
    """Each character is a token; the third call repeats the first. Reasoning has no calls."""
    twice = texts(("a", 1), ("a", 1))
    thought = f"<think>{twice}</think>\n\n" if parser else ""
    text = thought + texts(*[("a", 1), ("a", 2), ("a", 1), ("a", 3), ("a", 4)])
    given = [
        EngineOutput(
            "r",
            tuple(map(ord, text[start : start + interval])),
            text[start : start + interval],
            FinishReason.LENGTH if start + interval >= len(text) else None,
            3,
            start + interval,
            SpeculationStats(),
            text_lengths=(1,) * len(text[start : start + interval]),
        )
        for start in range(0, len(text), interval)
    ]
    ended = until_repeated(outputs([], *given), reading(parser), 1, ignored)
    found = [each.output async for each in ended]
    token_ids = [token for each in found for token in each.token_ids]
    kept = (thought + texts(("a", 1), ("a", 2), ("a", 1))).rindex("1}") + len("1}")
    assert "".join(map(chr, token_ids)) == "".join(each.text for each in found) == text[:kept]
    assert found[-1].num_output_tokens == kept
    assert matched_stop(found[-1]) is None
