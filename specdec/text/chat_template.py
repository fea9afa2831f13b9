"""Chat templates: rendering of a conversation to the text of a prompt.

A template is a Jinja program of the model; transformers runs it in a sandbox.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.text.chat_rewrites import RefusedChatError, render_some_form
from specdec.text.quoted_tokens import ControlTokens, RenderedChat
from specdec.text.tiktoken_model import TIKTOKEN_CLASS
from specdec.types.errors import InvalidValueError, reason_of
from specdec.types.request import Conversation

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import Template

_CONVERSATION_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Template variables that are set from the conversation."""

_TRANSFORMERS_VARIABLES = frozenset({"raise_exception", "strftime_now", "continue_final_message"})
"""Template variables that transformers sets."""

_PROBE = "a text in a message"
"""The content of messages that show how a template renders them."""

_SIGN = re.compile(r"[^\w\s]")
"""In a token that is no word."""

_TRANSFORMERS_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags around the assistant's text, used in training only and unknown to Jinja."""


def read_template(path: Path) -> str:
    """Return the source of a chat template. Raises InvalidValueError unless it can be parsed."""
    from jinja2 import TemplateSyntaxError

    try:
        source = path.read_text(encoding="utf-8")
        _parsed(source)
    except (OSError, UnicodeDecodeError, TemplateSyntaxError, RecursionError) as error:
        limit = f"a readable file in UTF-8 with a Jinja template ({reason_of(error)})"
        raise InvalidValueError("chat_template", str(path), limit) from error
    return source


def template_of_processor(directory: Path) -> str | None:
    """Return the template in chat_template.json; None without one.

    Processors of images and text save it there, and transformers' tokenizers do not read it. Raises
    ValueError for a file that is not JSON, and TypeError for one without an object, or with a
    template that is not a string.
    """
    path = directory / "chat_template.json"
    content = json.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(content, dict):
        raise TypeError(f"{path.name} is not a JSON object")
    template = content.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise TypeError(f"chat_template in {path.name} is {reprlib.repr(template)}, not a string")
    return template


class ChatTemplate:
    """The chat template of a tokenizer. Thread-safe."""

    def __init__(self, transformers_tokenizer: Any) -> None:
        """transformers_tokenizer: a PreTrainedTokenizerFast, with or without a template."""
        self._tokenizer = transformers_tokenizer
        self._reads_parts: dict[str, bool] = {}  # by template source

    @cached_property
    def text(self) -> str:
        """Template source; of several, the one for tools; empty without a template."""
        templates = self._tokenizer.chat_template
        if isinstance(templates, dict):
            return str(templates.get("tool_use") or templates.get("default") or "")
        return str(templates or "")

    @cached_property
    def plain_text(self) -> str:
        """Template source for conversations without tools; empty without a template."""
        templates = self._tokenizer.chat_template
        return str(templates.get("default") or "") if isinstance(templates, dict) else self.text

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set; empty if it cannot be parsed."""
        return _variables(self.text)

    @property
    def takes_tools(self) -> bool:
        """Return whether the template renders tools."""
        return "tools" in self.variables

    @cached_property
    def takes_later_systems(self) -> bool:
        """Return whether the template renders several system messages, also after other messages.

        Many raise an exception or leave them out; a rendered example shows it.
        """
        turns = (
            ("system", "a1a"),
            ("system", "b2b"),
            ("user", "c"),
            ("system", "d3d"),
            ("user", "e"),
        )
        messages = [{"role": role, "content": content} for role, content in turns]
        text = self._example(self.plain_text, messages)
        return all(content in text for role, content in turns if role == "system")

    @cached_property
    def omits_calls(self) -> bool:
        """Return whether the template renders only the first one of several calls in a message."""
        names, ids = ("get_x1x", "get_y2y"), ("call00001", "call00002")
        calls = [
            {"id": each, "type": "function", "function": {"name": name, "arguments": {}}}
            for each, name in zip(ids, names, strict=True)
        ]
        asked = {"role": "user", "content": _PROBE}
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        results = [{"role": "tool", "tool_call_id": each, "content": _PROBE} for each in ids]
        text = self._example(self.text, [asked, called, *results])
        return [name in text for name in names] == [True, False]

    def options(self, *, has_tools: bool = True) -> frozenset[str]:
        """Return the variables that `template_kwargs` may set, with or without tools."""
        return _options(self.text if has_tools else self.plain_text)

    def unknown_options(self, conversation: Conversation) -> list[str]:
        """Return the names in `template_kwargs` that the template lacks; `render` drops them."""
        options = self.options(has_tools=bool(conversation.tools))
        return sorted(conversation.template_kwargs.keys() - options)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        """The tokens that the template writes around messages, and all special ones."""
        system, user, assistant = (
            {"role": role, "content": _PROBE} for role in ("system", "user", "assistant")
        )
        asked = [
            self._example(self.plain_text, turns, opens_answer=False)
            for turns in ([system, user], [user])
        ]
        answered = self._example(self.plain_text, [user, assistant, user])
        added = self._tokenizer.added_tokens_decoder.values()
        signs = [each for each in added if each.special or _SIGN.search(each.content)]
        return ControlTokens(
            (each.content for each in signs if any(each.content in text for text in asked)),
            (each.content for each in signs if each.special or each.content in answered),
        )

    def render(self, conversation: Conversation) -> RenderedChat:
        """Return the text of the prompt. Raises InvalidValueError if the template fails.

        A template that fails gets the conversation in the forms of `chat_rewrites`. The error
        quotes messages of `raise_exception` only, since other errors of a template are not meant
        for clients.
        """
        self._check(conversation)
        try:
            return self._control_tokens.render(
                conversation, lambda chat: render_some_form(chat, self._rendered)
            )
        except RefusedChatError as error:
            refuses_tools = self._refuses_tools(error.chat)
            field = "tools" if refuses_tools else "messages"
            given = conversation.tools if refuses_tools else conversation.messages
            limit = f"acceptable to the model's chat template, which {_failure(error)}"
            raise InvalidValueError(field, f"{len(given)} given", limit) from error.failure

    def _refuses_tools(self, conversation: Conversation) -> bool:
        """Return whether the template renders a refused conversation without its tools."""
        if not conversation.tools or self.text != self.plain_text:
            return False
        try:
            self._rendered(replace(conversation, tools=()))
        except Exception:  # as in `render_some_form`
            return False
        return True

    def answer_start(self, conversation: Conversation, prompt: str, marks: Sequence[str]) -> str:
        """Return the beginning of the answer in `prompt`, the rendered conversation.

        It begins with the last one of `marks` in it. Without a mark it is the text of the message
        that the answer continues, and else empty.
        """
        starts = {mark: start for mark in marks if (start := prompt.rfind(mark)) >= 0}
        last = max(starts, key=lambda mark: starts[mark], default="")
        end = starts.get(last, 0) + len(last)
        if last and (not prompt[end:].strip() or end > self._answer_place(conversation, prompt)):
            return prompt[starts[last] :]
        continued = conversation.messages[-1] if conversation.continue_final_message else {}
        return str(continued.get("content") or "")

    def _answer_place(self, conversation: Conversation, prompt: str) -> int:
        """Return where the answer begins in the prompt: the chat before it is the same up to there.

        A chat that the template rejects without the answer gives the end of the prompt.
        """
        turns = conversation.messages
        before = replace(
            conversation,
            messages=turns[:-1] if conversation.continue_final_message else turns,
            add_generation_prompt=False,
            continue_final_message=False,
        )
        if not before.messages:
            return 0
        try:
            text = self.render(before).text
        except InvalidValueError:
            return len(prompt)
        if prompt.startswith(text):
            return len(text)
        pairs = enumerate(zip(prompt, text, strict=False))
        return next((place for place, (ours, theirs) in pairs if ours != theirs), len(prompt))

    def _rendered(self, conversation: Conversation) -> str:
        messages = [dict(message) for message in conversation.messages]
        if self._takes_parts(self._source(conversation)):
            messages = [_with_parts(message) for message in messages]
        unknown = set(self.unknown_options(conversation))
        given = conversation.template_kwargs.items()
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=self._tools(conversation),
            tokenize=False,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **{name: value for name, value in given if name not in unknown},
        )
        return text

    def _tools(self, conversation: Conversation) -> list[dict[str, Any]] | None:
        """Return the tools; Kimi's class, which is code of the repository, sorts their keys."""
        tools = [dict(tool) for tool in conversation.tools]
        has_kimi_class = TIKTOKEN_CLASS in str(self._tokenizer.init_kwargs.get("auto_map"))
        return (_with_sorted_keys(tools) if has_kimi_class else tools) or None

    def _source(self, conversation: Conversation) -> str:
        return self.text if conversation.tools else self.plain_text

    def _takes_parts(self, source: str) -> bool:
        """Return whether a template writes the content of a message only if it is a list of parts.

        It is found by rendering a message in both forms, since a template can read the parts in
        loops, filters, macros or by their place.
        """
        if source not in self._reads_parts:
            message = {"role": "user", "content": _PROBE}
            forms = (message, _with_parts(message))
            shows = [_PROBE in self._apply(source, [each]) for each in forms]
            self._reads_parts[source] = shows == [False, True]
        return self._reads_parts[source]

    def _example(
        self, source: str, messages: Sequence[dict[str, Any]], *, opens_answer: bool = True
    ) -> str:
        """Return the text of an example chat; empty if the template fails."""
        if self._takes_parts(source):
            messages = list(map(_with_parts, messages))
        return self._apply(source, messages, opens_answer=opens_answer)

    def _apply(
        self, source: str, messages: Sequence[dict[str, Any]], *, opens_answer: bool = True
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=source,
                tokenize=False,
                add_generation_prompt=opens_answer,
            )
        except Exception:  # as in `render_some_form`
            return ""
        return text

    def _check(self, conversation: Conversation) -> None:
        source = self._source(conversation)
        if not source:
            limit = "a prompt: the model has no chat template"
            raise InvalidValueError("messages", f"{len(conversation.messages)} given", limit)
        for name, value in conversation.template_kwargs.items():
            if name in _reserved(source):
                options = self.options(has_tools=bool(conversation.tools))
                known = ", ".join(sorted(options)) or "none"
                limit = f"left out, or a variable of the model's chat template: {known}"
                raise InvalidValueError(f"chat_template_kwargs.{name}", value, limit)
        if conversation.continue_final_message and conversation.add_generation_prompt:
            limit = "false where continue_final_message is true"
            raise InvalidValueError("add_generation_prompt", True, limit)


def _with_sorted_keys(value: Any) -> Any:
    """Return a JSON value in whose objects the keys are in order; lists keep theirs."""
    if isinstance(value, Mapping):
        return {name: _with_sorted_keys(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return list(map(_with_sorted_keys, value))
    return value


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def decoded_arguments(arguments: object) -> object:
    """Decode the arguments of a tool call: JSON text in the OpenAI API, objects in templates.

    An empty text and null are no arguments. Invalid JSON is returned unchanged, since a model may
    have generated it. A lone surrogate becomes U+FFFD, since a prompt is valid Unicode.
    """
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        decoded: object = json.loads(arguments)
        if "\\ud" in arguments.lower():
            decoded = json.loads(_without_lone_surrogates(json.dumps(decoded, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return arguments
    return {} if decoded is None else decoded


def _without_lone_surrogates(text: str) -> str:
    """Replace lone surrogates by U+FFFD; pairs become characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@lru_cache
def _variables(text: str) -> frozenset[str]:
    """Return the names that a template reads and does not set, without Jinja's globals."""
    from jinja2 import TemplateSyntaxError, meta

    try:
        environment, parsed = _parsed(text)
        read = meta.find_undeclared_variables(parsed)  # compiles it, which finds unknown filters
    except (TemplateSyntaxError, RecursionError):
        return frozenset()
    return frozenset(read) - set(environment.globals)


@lru_cache
def _reserved(text: str) -> frozenset[str]:
    """Return the variables of a template that a client may not set."""
    special = {name for name in _variables(text) if name.endswith("_token")}
    return _CONVERSATION_VARIABLES | _TRANSFORMERS_VARIABLES | special


@lru_cache
def _options(text: str) -> frozenset[str]:
    """Return the variables that a client may set, of those that a template reads."""
    return _variables(text) - _reserved(text)


def _parsed(text: str) -> tuple[Environment, Template]:
    """Return the nodes of a template, and their environment. Raises TemplateSyntaxError."""
    from jinja2 import Environment

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return environment, environment.parse(_TRANSFORMERS_TAGS.sub("", text))


def _failure(error: RefusedChatError) -> str:
    """Describe the failure of a template; only messages of `raise_exception` are quoted."""
    return f"raised: {' '.join(str(error).split())}" if error.is_described else "failed on them"
