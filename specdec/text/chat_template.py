"""A model's chat template: a conversation in, the text of a prompt out.

The template is a program in Jinja that comes with the model; transformers runs it in a sandbox.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from specdec.types.chat import Conversation
from specdec.types.errors import InvalidValueError

_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a template that a conversation fills by itself."""

_SUPPLIED = frozenset({"raise_exception", "strftime_now", "continue_final_message"})
"""Names to which transformers gives a meaning, and nobody else."""

_TRANSFORMERS_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Marks of the assistant's words, which concern training alone and Jinja does not know."""


class ChatTemplate:
    """The template of one tokenizer. Threads may share it."""

    def __init__(self, transformers_tokenizer: Any) -> None:
        """`transformers_tokenizer`: a PreTrainedTokenizerFast, with a template or without."""
        self._tokenizer = transformers_tokenizer

    @cached_property
    def text(self) -> str:
        """The template itself, the one for tools where there are several; empty without one."""
        templates = self._tokenizer.chat_template
        if isinstance(templates, dict):
            return str(templates.get("tool_use") or templates.get("default") or "")
        return str(templates or "")

    @cached_property
    def plain_text(self) -> str:
        """The one that is rendered where there are no tools; empty without one."""
        templates = self._tokenizer.chat_template
        return str(templates.get("default") or "") if isinstance(templates, dict) else self.text

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set; none where it cannot be parsed."""
        return _variables(self.text)

    @cached_property
    def _plain_variables(self) -> frozenset[str]:
        return _variables(self.plain_text)

    @property
    def takes_tools(self) -> bool:
        """Whether the template tells the model of tools, rather than passing over them."""
        return "tools" in self.variables

    def options(self, *, has_tools: bool = True) -> frozenset[str]:
        """What `template_kwargs` may set, of the template for a conversation with tools or not."""
        variables = self.variables if has_tools else self._plain_variables
        special = {name for name in variables if name.endswith("_token")}
        return variables - _GIVEN - _SUPPLIED - special

    def render(self, conversation: Conversation) -> str:
        """The text of the prompt. Raises InvalidValueError for what the template cannot take.

        It quotes what the template says on purpose. What else goes wrong in it is the model's
        affair, and not a client's.
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
        except Exception as error:  # a template is a program of the model's: it may raise anything
            given = f"{len(conversation.messages)} given"
            limit = f"acceptable to the model's chat template, which {_complaint(error)}"
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
    """Those of a tool call, which the OpenAI API has as JSON text; templates write it themselves.

    What is no JSON stays as it is: a model may have written it.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded: object = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if decoded is None else decoded


def _variables(text: str) -> frozenset[str]:
    """Names that a template reads and does not set, but for what Jinja itself gives it."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_TRANSFORMERS_TAGS.sub("", text))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(meta.find_undeclared_variables(parsed)) - set(environment.globals)


def _complaint(error: Exception) -> str:
    """What `raise_exception` says in a template, which alone is meant for readers."""
    from jinja2 import TemplateError

    if type(error) is not TemplateError:
        return "failed on them"
    return f"says: {' '.join(str(error).split())}"
