"""How models write tool calls: what they are told, and a grammar that holds them to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from specdec.types.sampling_params import StructuredOutput

ToolFormatName = Literal["hermes", "llama3_json"]

_WHITESPACE: Mapping[str, Any] = MappingProxyType(
    # As json.dumps writes it, which is what models have seen most of.
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
)
_BARE_CALL = r"[ \t\r\n]*(<\|python_tag\|>)?[ \t\r\n]*\{(?s:.*)"
"""What ToolCallParser may take for a call where calls have no marks."""
_ANY_ARGUMENTS: Mapping[str, Any] = MappingProxyType({"type": "object"})


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    parameters: JSON schema of its arguments, an object. is_strict: whether arguments have to be
    what the schema says even where the model is free to call or not.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: _ANY_ARGUMENTS)
    is_strict: bool = False

    @property
    def as_template_takes_it(self) -> dict[str, Any]:
        """The function as the OpenAI API describes it."""
        function = {"name": self.name, "parameters": dict(self.parameters)}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolFormat:
    """The marks around a call, which is {"name": ..., arguments_key: {...}} in all of them.

    opening, closing: what goes before and after it; empty where a call is the whole text.
    separator: between two calls.
    """

    name: ToolFormatName
    opening: str
    closing: str
    separator: str
    arguments_key: str

    def write(self, name: str, arguments: Any) -> str:
        """A call as the model would write it."""
        call = json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)
        padding = "\n" if self.opening else ""
        return f"{self.opening}{padding}{call}{padding}{self.closing}"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n", "arguments")
"""Of Hermes and Qwen: calls between marks, anywhere in a text."""

LLAMA = ToolFormat("llama3_json", "", "", "; ", "parameters")
"""Of Llama 3.1 and later: the text is a call, or several with semicolons."""

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({"hermes": HERMES, "llama3_json": LLAMA})


def format_of_template(template: str) -> ToolFormat:
    """What a chat template teaches; Hermes' where it teaches none."""
    is_llama = HERMES.opening not in template and '"parameters"' in template
    return LLAMA if is_llama else HERMES


def tool_prompt(tools: Iterable[Tool], form: ToolFormat) -> str:
    """A system message for a model whose template says nothing of tools."""
    described = "\n".join(
        json.dumps(each.as_template_takes_it["function"], ensure_ascii=False) for each in tools
    )
    example = form.write("NAME", {"PARAMETER": "VALUE"})
    return (
        f"You can call these functions:\n<tools>\n{described}\n</tools>\n"
        f"To call one, write its name and arguments as JSON:\n{example}\n"
        "The result comes back between <tool_response> and </tool_response>."
    )


def forced_calls(tools: Sequence[Tool], form: ToolFormat, *, is_parallel: bool) -> StructuredOutput:
    """A text that is nothing but a call, or where `is_parallel` several."""
    more = f" ({_quoted(form.separator)} call)*" if is_parallel else ""
    opening = _quoted(form.opening) if form.opening else ""
    rules = [f"start: call{more}", *_call_rules(tools, form, opening)]
    return StructuredOutput(grammar="\n".join(rules))


def optional_calls(
    tools: Sequence[Tool], form: ToolFormat, *, is_parallel: bool
) -> StructuredOutput:
    """Any text, in which what is marked as a call is one of a known function.

    Arguments are held to the schema of functions that are strict, and are any object elsewhere.
    """
    loose = [each if each.is_strict else replace(each, parameters=_ANY_ARGUMENTS) for each in tools]
    if not form.opening:
        more = f" ({_quoted(form.separator)} call)*" if is_parallel else ""
        rules = [f"start: TEXT? | call{more}", f"TEXT: /(?s:.+)/ & ~/{_BARE_CALL}/"]
        return StructuredOutput(grammar="\n".join([*rules, *_call_rules(loose, form, "")]))
    mark, repeat = form.opening, "+" if is_parallel else ""
    rules = [
        f"start: TEXT? | call{repeat} TEXT?",
        f"head[lazy]: /(?s:.*){mark}/",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*{mark}.*)/",
    ]
    return StructuredOutput(grammar="\n".join([*rules, *_call_rules(loose, form, "head")]))


def _call_rules(tools: Sequence[Tool], form: ToolFormat, opening: str) -> list[str]:
    padding = "\n" if form.opening else ""
    bodies = " | ".join(f"call_{index}" for index in range(len(tools)))
    closing = _quoted(padding + form.closing) if form.closing else ""
    rules = [f"call: {opening} ({bodies}) {closing}".rstrip()]
    for index, tool in enumerate(tools):
        head = f'{padding}{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": '
        rules.append(f'call_{index}: {_quoted(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {_schema(tool)}")
    return rules


def _schema(tool: Tool) -> str:
    """The schema, of an object whatever else it says, with our whitespace.

    Options of its own cannot switch off what it demands.
    """
    return json.dumps({**tool.parameters, "type": "object", "x-guidance": dict(_WHITESPACE)})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
