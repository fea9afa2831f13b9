"""Marks of reasoning are validated."""

import pytest

from specdec.types.errors import InvalidValueError
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import StructuredOutput


@pytest.mark.parametrize(
    ("marks", "field"),
    [
        ({"closings": ()}, "reasoning.closings length"),
        ({"closings": ("",)}, r"reasoning.closings\[0\]"),
        ({"closings": ("a",), "openings": ("\ud800",)}, r"reasoning.openings\[0\]"),
        ({"closings": ("a",), "openings": ("<think>", "\n<think>")}, r"reasoning.openings\[1\]"),
        ({"closings": ("a",), "begins_inside": 1}, "reasoning.begins_inside"),
        ({"closings": ("a",) * 17}, "reasoning.closings"),
    ],
)
def test_marks_are_validated(marks, field):
    with pytest.raises(InvalidValueError, match=f"structured_output.{field}"):
        ReasoningMarks(**marks)


def test_lists_of_marks_are_accepted():
    marks = ReasoningMarks(["<think>"], ["</think>"])
    assert marks == ReasoningMarks(("<think>",), ("</think>",), begins_inside=False)
    assert hash(StructuredOutput(regex="a", reasoning=marks))


def test_reasoning_is_no_form():
    marks = ReasoningMarks((), ("</think>",))
    assert StructuredOutput(regex="a", reasoning=marks).kind == "regex"
    with pytest.raises(InvalidValueError, match="exactly one of json_schema"):
        StructuredOutput(reasoning=marks)
