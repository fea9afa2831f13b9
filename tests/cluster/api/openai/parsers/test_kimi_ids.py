"""Calls of Kimi by ids in its own form and in others: the right function, or none."""

import pytest

from cluster.api.openai.parsers.pieces import CallStart, Content
from cluster.api.openai.parsers.tool_families import tool_parser
from cluster.api.openai.parsers.tool_format import TOOL_FORMATS, Tool

NAMES = ("time", "step", "step_1", "files.search", "functions.list", "list")


@pytest.mark.parametrize(
    ("written", "name", "call_id"),
    [
        ("functions.time:3", "time", "functions.time:3"),
        ("functions.files.search:0", "files.search", "functions.files.search:0"),
        ("functions.list:0", "list", "functions.list:0"),
        ("functions.functions.list:0", "functions.list", "functions.functions.list:0"),
        ("time:3", "time", "time:3"),
        ("step_1:3", "step_1", "step_1:3"),
        (" files.search ", "files.search", ""),
        ("functions.step_1", "step_1", ""),
        ("functions_step_1_0", "step_1", ""),
        ("functionstime5", "time", ""),
        ("functions_time:0", "time", ""),
        ("functions_step_1", None, "of step or of step_1"),
        ("functions.search:0", None, "of a part of a name"),
        ("functions.erase:0", None, "of an unknown function"),
        ("timer", None, "of an unknown function"),
        ("time5", None, "of an unknown function"),
        ("step_2", None, "of an unknown function"),
        ("call_0", None, "of no function"),
    ],
)
def test_an_id_calls_the_function_that_it_names_and_no_other(written, name, call_id):
    text = f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    for parts in ([text], text):
        parser = tool_parser(TOOL_FORMATS["kimi_k2"], [*map(Tool, NAMES)])
        pieces = [each for part in parts for each in parser.feed(part)] + [*parser.finish()]
        starts = [each for each in pieces if isinstance(each, CallStart)]
        content = "".join(each.text for each in pieces if isinstance(each, Content))
        assert starts == ([CallStart(0, name, call_id)] if name else [])
        assert content == ("" if name else text)
