"""HTML of outputs: every token once, drafted ones marked, all of it escaped."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import Choice, Completion, FinishReason, Usage
from specdec.types.token_display import (
    MAX_OUTPUTS,
    MAX_TOKENS,
    ShownChoice,
    ShownOutput,
    outputs_html,
    token_texts,
)

STATS = SpeculationStats(num_drafts=4, num_draft_tokens=10, num_accepted_tokens=6)
TEXT_LINE = re.compile(r"<div class='text' dir='auto'>(.*?)</div>", re.S)
HOSTILE = "<script>alert(1)</script>\"'&amp;$x$ </mark></div>"


def choice_of(pieces, is_drafted, finish_reason="stop"):
    lengths = [len(piece) for piece in pieces]
    return ShownChoice("".join(pieces), is_drafted, lengths, finish_reason)


def shown(*choices, prompt=None, speculation=STATS):
    return outputs_html([ShownOutput(prompt, choices, speculation)])


def test_each_token_has_its_text():
    assert token_texts("the river", [3, 0, 6]) == ["the", "", " river"]
    assert token_texts("", []) == []
    with pytest.raises(AssertionError, match="another text"):
        token_texts("the river", [3])


def test_drafted_tokens_are_marked():
    page = shown(choice_of(["the", " river", " runs", ""], [False, True, False, True]))
    assert TEXT_LINE.findall(page) == ["the<mark title='drafted'> river</mark> runs"]
    assert "4 tokens, <mark>2 drafted</mark>; stop" in page
    assert "6 of 10 draft tokens accepted (60%), 2.50 tokens a draft" in page


@given(st.lists(st.tuples(st.text(), st.booleans())), st.text())
def test_the_page_has_exactly_the_text_whatever_it_is(tokens, prompt):
    pieces, is_drafted = [each[0] for each in tokens], [each[1] for each in tokens]
    page = shown(choice_of(pieces, is_drafted), prompt=prompt)
    [line] = TEXT_LINE.findall(page)
    assert html.unescape(re.sub(r"</?mark[^>]*>", "", line)) == "".join(pieces)
    marked = re.findall(r"<mark title='drafted'>(.*?)</mark>", line, re.S)
    drafted = [piece for piece, is_one in tokens if is_one and piece]
    assert [html.unescape(each) for each in marked] == drafted


def test_no_text_becomes_markup_or_mathematics():
    page = shown(choice_of([HOSTILE], [True], HOSTILE), prompt=HOSTILE)
    assert "<script" not in page
    assert "alert(1)" in page
    tags = set(re.findall(r"</?(\w+)", page))
    assert tags == {"style", "div", "mark"}
    assert page.count("<div") == page.count("</div")
    for name in ("tex2jax_ignore", "mathjax_ignore"):
        assert name in page


def test_long_outputs_are_shortened():
    pieces = ["a "] * (MAX_TOKENS + 3)
    page = shown(choice_of(pieces, [False] * len(pieces)), prompt="p" * 10_000)
    assert " ... 3 more tokens" in page
    assert len(page) < 3 * MAX_TOKENS
    outputs = [ShownOutput("p", [choice_of(["a"], [False])], STATS)] * (MAX_OUTPUTS + 2)
    assert "2 more outputs" in outputs_html(outputs)
    assert "more outputs" not in outputs_html(outputs[:MAX_OUTPUTS])
    assert outputs_html([]).startswith("<style>")


def test_an_output_that_runs_or_without_drafts_or_lengths_is_shown():
    page = shown(choice_of(["a"], [False], None), speculation=SpeculationStats())
    assert "1 tokens, <mark>0 drafted</mark>; running" in page
    assert "nothing was drafted" in page
    page = shown(ShownChoice("a < b", [False] * 3, [], "stop"))
    assert TEXT_LINE.findall(page) == ["a &lt; b"]


def test_a_completion_of_the_client_is_shown():
    choices = tuple(
        Choice(index, text, (5, 6), FinishReason.LENGTH, is_drafted=(False, True),
               text_lengths=(1, len(text) - 1))
        for index, text in enumerate(("<b", "cd"))
    )  # fmt: skip
    page = Completion("r", choices, 1, Usage(3, 4, STATS))._repr_html_()
    assert TEXT_LINE.findall(page) == [
        "&lt;<mark title='drafted'>b</mark>",
        "c<mark title='drafted'>d</mark>",
    ]
    assert "2 tokens, <mark>1 drafted</mark>; length" in page


def test_a_text_of_an_older_service_is_shown_without_marks_and_counts():
    """It does not send which tokens were drafted, nor their lengths."""
    choice = Choice(0, "a < b", (5, 6), FinishReason.STOP)
    page = Completion("r", (choice,), 1, Usage(3, 2, STATS))._repr_html_()
    assert TEXT_LINE.findall(page) == ["a &lt; b"]
    assert "<mark>" not in page
    assert "stop" in page


def test_a_text_with_the_lengths_of_a_part_of_it_is_shown_as_a_whole():
    """An output of a stream without new tokens may have the rest of the text."""
    page = shown(ShownChoice("a < b", [True], [3], "abort"))
    assert TEXT_LINE.findall(page) == ["a &lt; b"]
