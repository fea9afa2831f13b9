"""Chat templates: rendering of a conversation to the text of a prompt.

A template is a Jinja program of the model; transformers runs it in a sandbox.
"""

from __future__ import annotations

import json
import re
from functools import cached_property, lru_cache
from typing import Any

from specdec.types.errors import InvalidValueError
from specdec.types.request import Conversation

_CONVERSATION_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Template variables that are set from the conversation."""

_TRANSFORMERS_VARIABLES = frozenset({"raise_exception", "strftime_now", "continue_final_message"})
"""Template variables that transformers sets."""

_TRANSFORMERS_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags around the assistant's text, used in training only and unknown to Jinja."""


class ChatTemplate:
    """The chat template of a tokenizer. Thread-safe."""

    def __init__(self, transformers_tokenizer: Any) -> None:
        """transformers_tokenizer: a PreTrainedTokenizerFast, with or without a template."""
        self._tokenizer = transformers_tokenizer

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

    def options(self, *, has_tools: bool = True) -> frozenset[str]:
        """Return the variables that `template_kwargs` may set, with or without tools."""
        variables = _variables(self.text if has_tools else self.plain_text)
        special = {name for name in variables if name.endswith("_token")}
        return variables - _CONVERSATION_VARIABLES - _TRANSFORMERS_VARIABLES - special

    def render(self, conversation: Conversation) -> str:
        """Return the text of the prompt. Raises InvalidValueError if the template fails.

        The error quotes messages of `raise_exception` only, since other errors of a template are
        not meant for clients.
        """
        self._check(conversation)
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in conversation.messages],
                tools=[dict(tool) for tool in conversation.tools] or None,
                tokenize=False,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                **conversation.template_kwargs,
            )
        except Exception as error:  # a template is a program and can raise any exception
            given = f"{len(conversation.messages)} given"
            limit = f"acceptable to the model's chat template, which {_failure(error)}"
            raise InvalidValueError("messages", given, limit) from error
        return text

    def _check(self, conversation: Conversation) -> None:
        has_tools = bool(conversation.tools)
        if not (self.text if has_tools else self.plain_text):
            limit = "a prompt: the model has no chat template"
            raise InvalidValueError("messages", f"{len(conversation.messages)} given", limit)
        options = self.options(has_tools=has_tools)
        for name, value in conversation.template_kwargs.items():
            if name not in options:
                known = ", ".join(sorted(options)) or "none"
                limit = f"left out, or a variable of the model's chat template: {known}"
                raise InvalidValueError(f"chat_template_kwargs.{name}", value, limit)
        if conversation.continue_final_message and conversation.add_generation_prompt:
            limit = "false where continue_final_message is true"
            raise InvalidValueError("add_generation_prompt", True, limit)


def decoded_arguments(arguments: object) -> object:
    """Decode the arguments of a tool call: JSON text in the OpenAI API, objects in templates.

    Invalid JSON is returned unchanged, since a model may have generated it. A lone surrogate
    becomes U+FFFD, since a prompt is valid Unicode.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded: object = json.loads(arguments)
        if "\\ud" in arguments.lower():
            decoded = json.loads(_without_lone_surrogates(json.dumps(decoded, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return arguments
    return arguments if decoded is None else decoded


def _without_lone_surrogates(text: str) -> str:
    """Replace lone surrogates by U+FFFD; pairs become characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@lru_cache
def _variables(text: str) -> frozenset[str]:
    """Return the names that a template reads and does not set, without Jinja's globals."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_TRANSFORMERS_TAGS.sub("", text))
        return frozenset(meta.find_undeclared_variables(parsed)) - set(environment.globals)
    except (TemplateSyntaxError, RecursionError):
        return frozenset()


def _failure(error: Exception) -> str:
    """Describe the failure of a template; only messages of `raise_exception` are quoted."""
    from jinja2 import TemplateError

    if type(error) is not TemplateError:
        return "failed on them"
    return f"raised: {' '.join(str(error).split())}"
