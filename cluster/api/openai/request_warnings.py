"""Warnings of a request that is answered although a part of it has no effect, in a header."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specdec.text.chat_template import ChatTemplate
from specdec.types.request import Conversation

WARNINGS_HEADER = "x-specdec-warnings"
_MAX_WARNINGS = 8
_MAX_NAME_CHARS = 64


@dataclass(frozen=True)
class RequestWarning:
    """A note on a field that has no effect. field: the engine's name."""

    field: str
    text: str


def template_warnings(conversation: Conversation, template: ChatTemplate) -> list[RequestWarning]:
    """Return a warning for each variable that the chat template lacks, which is not passed."""
    unknown = template.unknown_options(conversation)
    text = "ignored: the model's chat template has no such variable"
    return [RequestWarning(f"chat_template_kwargs.{name}", text) for name in unknown]


def warning_headers(
    warnings: Sequence[RequestWarning], get_names: Callable[[], Mapping[str, str]]
) -> dict[str, str]:
    """Return the header with the first eight warnings, as a JSON list in ASCII; {} without any.

    get_names: returns those of fields in the request, by the engine's.
    """
    if not warnings:
        return {}
    names = get_names()
    texts = [
        f"{names.get(each.field, each.field)[:_MAX_NAME_CHARS]}: {each.text}"
        for each in warnings[:_MAX_WARNINGS]
    ]
    return {WARNINGS_HEADER: json.dumps(texts)}
