"""The formats of tool calls: the prompt that describes them, and grammars that enforce them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from cluster.config.parsers import ToolFormatName
from specdec.text.grammar.json_schema import enforceable
from specdec.types.sampling.sampling_params import StructuredOutput

# The output of json.dumps, the most common form in training data.
_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LENIENT = {**_WHITESPACE, "lenient": True}  # without keywords that no grammar can enforce
_BARE_CALL = r"((?s:.*)<\|python_tag\|>)?[ \t\r\n\[\]]*\{(?s:.*)"
"""Texts that ToolCallParser may parse as a call in a format without marks."""
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
MAX_CALLS = 128
"""Limit of forced calls in one answer, equal to that of the calls in a message."""


def deepseek_mark(words: str) -> str:
    """Return DeepSeek's special token of these words, with wide bars and block characters."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    parameters: JSON schema of its arguments, an object. is_strict: whether the schema is enforced
    also with tool_choice `auto`; None where the client leaves it out, which means no.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: _ANY_ARGUMENTS)
    is_strict: bool | None = None

    @property
    def template_definition(self) -> dict[str, Any]:
        """The definition in the format of the OpenAI API, for chat templates.

        Its fields are in the order of that API, which templates copy into the prompt.
        """
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        if self.is_strict is not None:
            function["strict"] = self.is_strict
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolFormat:
    """The format of a call: marks around {"name": ..., arguments_key: {...}}.

    opening, closing: the marks before and after it; empty if a call is the whole text.
    separator: between two calls. is_json: False for a family whose calls are no such objects, or
    are in lists of them.
    optional_mark: the mark before calls that follow a text, where calls alone need none.
    is_assumed: whether calls may be in another format, as that of the model is not known.
    """

    name: ToolFormatName
    opening: str
    closing: str = ""
    separator: str = "; "
    arguments_key: str = "arguments"
    is_json: bool = True
    optional_mark: str = ""
    is_assumed: bool = False

    def write(self, name: str, arguments: Any) -> str:
        """Write a call like the model."""
        call = json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)
        padding = "\n" if self.opening else ""
        return f"{self.opening}{padding}{call}{padding}{self.closing}"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n", "arguments")
"""Format of Hermes and Qwen: calls between marks, anywhere in a text."""

LLAMA = ToolFormat("llama3_json", "", "", "; ", "parameters", optional_mark="<|python_tag|>")
"""Format of Llama 3.1 and later: the text is a call, or several with semicolons."""

BARE = ToolFormat("llama3_json", "")
"""Format that grammars enforce where that of the model is no text, or no JSON object."""

_FAMILIES = (
    ToolFormat("llama4_pythonic", "", is_json=False, optional_mark="<|python_start|>"),
    ToolFormat("mistral", "[TOOL_CALLS]", is_json=False),
    ToolFormat("qwen3_coder", "<tool_call>", is_json=False),
    ToolFormat("deepseek_v3", deepseek_mark("tool call begin"), is_json=False),
    ToolFormat("deepseek_v31", deepseek_mark("tool call begin"), is_json=False),
    ToolFormat("glm45", "<tool_call>", is_json=False),
    ToolFormat("kimi_k2", "<|tool_call_begin|>", is_json=False),
    ToolFormat("gpt_oss", "<|channel|>", is_json=False),
    ToolFormat("gemma4", "<|tool_call>", is_json=False),
    ToolFormat("lfm2", "<|tool_call_start|>", is_json=False),
    ToolFormat("nemotron_json", "<TOOLCALL>", is_json=False),
    ToolFormat("cohere_command3", "<|START_ACTION|>", is_json=False),
    ToolFormat("granite", "<|tool_call|>", is_json=False),
    ToolFormat("minimax_m2", "<minimax:tool_call>", is_json=False),
    ToolFormat("seed_oss", "<seed:tool_call>", is_json=False),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in (HERMES, LLAMA, *_FAMILIES)}

_IN_TEMPLATES: tuple[tuple[str, ToolFormatName], ...] = (
    ("<|channel|>", "gpt_oss"),
    ("<|tool_call>call:", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<TOOLCALL>", "nemotron_json"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|tool_call|>", "granite"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4_pythonic"),
)
"""Texts in chat templates by which a family is recognized."""


_LLAMA_EXAMPLE = re.compile(r'\{"name": [^{}]*, "parameters": ')


@lru_cache(maxsize=16)  # searches the whole template for each family
def format_of_template(template: str) -> ToolFormat | None:
    """Return the format in a chat template; None if no known one is in it."""
    if deepseek_mark("tool calls begin") in template:
        return TOOL_FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    for text, name in _IN_TEMPLATES:
        if text in template:
            return TOOL_FORMATS[name]
    if HERMES.opening in template:
        return HERMES
    return LLAMA if _LLAMA_EXAMPLE.search(template) else None


def tool_prompt(tools: Iterable[Tool], form: ToolFormat) -> str:
    """Write a system message that describes the tools, for a template without tool support."""
    described = "\n".join(
        json.dumps(each.template_definition["function"], ensure_ascii=False) for each in tools
    )
    example = form.write("NAME", {"PARAMETER": "VALUE"})
    return (
        f"You can call these functions:\n<tools>\n{described}\n</tools>\n"
        f"To call one, write its name and arguments as JSON:\n{example}\n"
        "The result comes back between <tool_response> and </tool_response>."
    )


def forced_calls(tools: Sequence[Tool], form: ToolFormat, *, is_parallel: bool) -> StructuredOutput:
    """Return a grammar for a text that is one call, or with `is_parallel` up to MAX_CALLS."""
    more = f" ({_quoted(form.separator)} call){{0,{MAX_CALLS - 1}}}" if is_parallel else ""
    opening = _quoted(form.opening) if form.opening else ""
    rules = [f"start: call{more}", *_call_rules(tools, form, opening)]
    return StructuredOutput(grammar="\n".join(rules))


def calls_or_answer(
    tools: Sequence[Tool], form: ToolFormat, schema: Mapping[str, Any], *, is_parallel: bool
) -> StructuredOutput:
    """Return a grammar for a text that is calls, as in `optional_calls`, or JSON of the schema."""
    more = f" ({_quoted(form.separator)} call)*" if is_parallel else ""
    opening = _quoted(form.opening) if form.opening else ""
    answer = json.dumps({**enforceable(schema), "x-guidance": _WHITESPACE})
    rules = [f"start: answer | call{more}", f"answer: %json {answer}"]
    return StructuredOutput(grammar="\n".join([*rules, *_call_rules(_loose(tools), form, opening)]))


def _loose(tools: Iterable[Tool]) -> list[Tool]:
    """Return the tools with any object as the arguments of those that are not strict."""
    return [each if each.is_strict else replace(each, parameters=_ANY_ARGUMENTS) for each in tools]


def optional_calls(
    tools: Sequence[Tool], form: ToolFormat, *, is_parallel: bool
) -> StructuredOutput:
    """Return a grammar for any text whose marked calls are of known functions.

    The arguments of strict functions match their schema; those of others are any object.
    """
    loose = _loose(tools)
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
    """Serialize the schema, forced to an object, with our whitespace.

    Overwrite `x-guidance`: a client's options could disable the schema's requirements.
    """
    options = _WHITESPACE if tool.is_strict else _LENIENT
    parameters = enforceable(tool.parameters, is_lenient=not tool.is_strict)
    return json.dumps({**parameters, "type": "object", "x-guidance": options})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
