"""Thirty outputs with tool calls, written in the format of each model family.

An output is a text before the calls, the calls, and a text after them. Families differ in their
marks and in how they write arguments; what a parser has to find does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.api.openai.parsers.tool_format import Tool, deepseek_mark

_PROPERTIES = {
    "city": {"type": "string"},
    "unit": {"enum": ["celsius", "fahrenheit"]},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "share": {"type": "number"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object"},
    "note": {"type": ["string", "null"]},
    "code": {"type": "string"},
}
TOOLS = tuple(
    Tool(name, parameters={"type": "object", "properties": _PROPERTIES})
    for name in ("get_weather", "time", "files.search")
)


@dataclass(frozen=True)
class Output:
    """before, after: content around the calls. calls: names and arguments."""

    before: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    after: str = ""


def _one(before: str = "", after: str = "", **arguments: Any) -> Output:
    return Output(before, (("get_weather", arguments),), after)


OUTPUTS: tuple[Output, ...] = (
    _one(city="Ulm"),
    _one(city="Ulm", unit="celsius"),
    _one(city="Ulm", days=3),
    _one(city="Ulm", days=-12, exact=True),
    _one(exact=False, share=0.25),
    _one(share=1e-05),
    _one(tags=["wind", "rain"]),
    _one(tags=[]),
    _one(place={"lat": 48.4, "lon": 9.99}),
    _one(place={"names": ["Ulm", "Neu-Ulm"], "deep": {"er": [1, {"x": None}]}}),
    _one(note=None),
    _one(city="São Paulo, 東京 🌦"),
    _one(city='The "baker"'),
    _one(city="it's"),
    _one(city="C:\\temp\\new"),
    _one(code="def f(x):\n    return {'a': [x]}"),
    _one(code="if a < b and c > d: pass"),
    _one(code="{[(}])"),
    _one(city=""),
    Output("", (("time", {}),)),
    Output("Let me see.", (("time", {}),)),
    Output("I look both up:", (("get_weather", {"city": "Ulm"}), ("time", {}))),
    Output("", (("get_weather", {"city": "Ulm"}), ("get_weather", {"city": "Bonn"}))),
    Output("", tuple(("get_weather", {"days": each}) for each in range(3))),
    Output("", (("files.search", {"tags": ["a, b", "c"], "exact": True}),)),
    Output("1 < 2, and [x] is no call.", (("time", {}),)),
    Output("First line.\n\nSecond line.", (("get_weather", {"city": "Ulm", "days": 1}),)),
    Output("No call at all.", ()),
    Output('A list: [1, 2] and {"a": 1}.', ()),
    Output("  indented, with a trailing break\n", ()),
)
"""Contents and arguments that are awkward in one format or another."""

Writer = Callable[[Output], str]


def _text(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _plain(value: Any) -> str:
    """Write a parameter between tags: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _before(output: Output, separator: str = "\n") -> str:
    return f"{output.before}{separator}" if output.before and output.calls else output.before


def _mistral(output: Output) -> str:
    calls = "".join(f"[TOOL_CALLS]{name}[ARGS]{_text(given)}" for name, given in output.calls)
    return _before(output) + calls


def _mistral_list(output: Output) -> str:
    calls = [{"name": name, "arguments": given} for name, given in output.calls]
    listed = f"[TOOL_CALLS] {json.dumps(calls, ensure_ascii=False)}" if calls else ""
    return _before(output) + listed


def _qwen3_coder(output: Output) -> str:
    calls = []
    for name, given in output.calls:
        parameters = "".join(
            f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in given.items()
        )
        calls.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return _before(output, "\n\n") + "\n".join(calls)


def _deepseek_v3(output: Output) -> str:
    calls = "\n".join(
        f"{deepseek_mark('tool call begin')}function{deepseek_mark('tool sep')}{name}\n```json\n"
        f"{_text(given)}\n```{deepseek_mark('tool call end')}"
        for name, given in output.calls
    )
    return _deepseek_section(output, calls)


def _deepseek_v31(output: Output) -> str:
    calls = "".join(
        f"{deepseek_mark('tool call begin')}{name}{deepseek_mark('tool sep')}{_text(given)}"
        f"{deepseek_mark('tool call end')}"
        for name, given in output.calls
    )
    return _deepseek_section(output, calls)


def _deepseek_section(output: Output, calls: str) -> str:
    if not calls:
        return output.before
    begin, end = deepseek_mark("tool calls begin"), deepseek_mark("tool calls end")
    return f"{_before(output)}{begin}{calls}{end}"


def _glm45(output: Output) -> str:
    calls = []
    for name, given in output.calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in given.items()
        )
        calls.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return _before(output) + "\n".join(calls)


def _kimi_k2(output: Output) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_text(given)}"
        "<|tool_call_end|>"
        for index, (name, given) in enumerate(output.calls)
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return _before(output, "") + section


def _pythonic(output: Output) -> str:
    """Llama writes calls or text, never both."""
    if not output.calls:
        return output.before
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in output.calls
    )
    return f"[{', '.join(written)}]"


def _pythonic_marked(output: Output) -> str:
    return f"<|python_start|>{_pythonic(output)}<|python_end|>" if output.calls else output.before


def _lfm2(output: Output) -> str:
    """LFM2 writes lists and objects as JSON, texts in single quotes, and text before the calls."""
    written = (
        f"{name}({', '.join(f'{key}={_lfm2_value(value)}' for key, value in given.items())})"
        for name, given in output.calls
    )
    calls = f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>" if output.calls else ""
    return _before(output) + calls


def _lfm2_value(value: Any) -> str:
    if not isinstance(value, str):
        return _text(value) if isinstance(value, dict | list) else str(value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def _gemma4(output: Output) -> str:
    calls = "".join(
        f"<|tool_call>call:{name}{_gemma4_value(given)}<tool_call|>" for name, given in output.calls
    )
    return _before(output) + calls


def _gemma4_value(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            pairs = (f"{key}:{_gemma4_value(each)}" for key, each in sorted(value.items()))
            return f"{{{','.join(pairs)}}}"
        case list():
            return f"[{','.join(map(_gemma4_value, value))}]"
    return json.dumps(value)


def _nemotron_json(output: Output) -> str:
    calls = [{"name": name, "arguments": given} for name, given in output.calls]
    return _before(output) + (f"<TOOLCALL>{_text(calls)}</TOOLCALL>" if calls else "")


def _granite(output: Output, mark: str = "<|tool_call|>") -> str:
    calls = [{"name": name, "arguments": given} for name, given in output.calls]
    return _before(output) + (mark + _text(calls) if calls else "")


def _granite_text(output: Output) -> str:
    return _granite(output, "<tool_call>")


def _cohere_command3(output: Output) -> str:
    if not output.calls:
        return f"<|START_RESPONSE|>{output.before}<|END_RESPONSE|>"
    calls = ",\n".join(
        f"    {_text({'tool_call_id': str(index), 'tool_name': name, 'parameters': given})}"
        for index, (name, given) in enumerate(output.calls)
    )
    return f"{_before(output)}<|START_ACTION|>[\n{calls}\n]<|END_ACTION|>"


def _minimax_m2(output: Output) -> str:
    calls = "\n".join(
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in given.items()
        )
        + "</invoke>"
        for name, given in output.calls
    )
    section = f"<minimax:tool_call>\n{calls}\n</minimax:tool_call>" if calls else ""
    return _before(output) + section


def _seed_oss(output: Output) -> str:
    """Seed-OSS writes lists and objects in Python's syntax."""
    calls = "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>{_seed_value(value)}</parameter>\n" for key, value in given.items()
        )
        + "</function>\n</seed:tool_call>"
        for name, given in output.calls
    )
    return _before(output) + calls


def _seed_value(value: Any) -> str:
    return "null" if value is None else str(value)


def _gpt_oss(output: Output) -> str:
    preamble = ""
    if output.before:
        channel = "commentary" if output.calls else "final"
        preamble = f"<|channel|>{channel}<|message|>{output.before}<|end|>"
    calls = "<|call|>".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{_text(given)}"
        for name, given in output.calls
    )
    return preamble + calls


def _hermes(output: Output) -> str:
    calls = "\n".join(
        f"<tool_call>\n{_text({'name': name, 'arguments': given})}\n</tool_call>"
        for name, given in output.calls
    )
    return _before(output) + calls


def _llama3_json(output: Output) -> str:
    """Llama writes calls or text, never both."""
    calls = "; ".join(_text({"name": name, "parameters": given}) for name, given in output.calls)
    return calls or output.before


FAMILIES: Mapping[str, tuple[str, Writer]] = {
    "hermes": ("hermes", _hermes),
    "llama3_json": ("llama3_json", _llama3_json),
    "llama4_pythonic": ("llama4_pythonic", _pythonic),
    "llama4_pythonic, marked": ("llama4_pythonic", _pythonic_marked),
    "mistral": ("mistral", _mistral),
    "mistral, list": ("mistral", _mistral_list),
    "qwen3_coder": ("qwen3_coder", _qwen3_coder),
    "deepseek_v3": ("deepseek_v3", _deepseek_v3),
    "deepseek_v31": ("deepseek_v31", _deepseek_v31),
    "glm45": ("glm45", _glm45),
    "kimi_k2": ("kimi_k2", _kimi_k2),
    "gpt_oss": ("gpt_oss", _gpt_oss),
    "gemma4": ("gemma4", _gemma4),
    "lfm2": ("lfm2", _lfm2),
    "nemotron_json": ("nemotron_json", _nemotron_json),
    "cohere_command3": ("cohere_command3", _cohere_command3),
    "granite": ("granite", _granite),
    "granite, text": ("granite", _granite_text),
    "minimax_m2": ("minimax_m2", _minimax_m2),
    "seed_oss": ("seed_oss", _seed_oss),
}
"""Parser and writer of each format."""

CALLS_OR_TEXT = ("llama3_json", "llama4_pythonic")
"""Families without a text beside calls."""
