"""Control tokens in the texts of messages: they stay text, and open no turn.

A tokenizer finds control tokens, such as `<|im_end|>`, wherever their text is, so that a message or
a page that a tool has read could end its turn and begin one of the system. Before a chat is
rendered a mark is put into such a text, and the tokenizer reads the text with a mark as any other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from specdec.types.errors import InvalidValueError
from specdec.types.request import Conversation

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_TRUSTED_ROLES = ("developer", "system")
"""Roles of the application's own messages, which may contain control tokens."""

_MARKS = "\U0001091f\U0001093f\U00010857\U00010a7f"
"""Signs between words of ancient scripts: part of no longer token, and printed as they are where a
template writes an object."""


@dataclass(frozen=True)
class RenderedChat:
    """The text of a prompt.

    quoted_at: places in it, after the first character of a control token that is only text.
    """

    text: str
    quoted_at: tuple[int, ...] = ()

    def encode(self, backend: Backend) -> list[int]:
        """Return the token ids, without those that a tokenizer adds to a text.

        Slower than to encode the text, which suffices where nothing is quoted.
        """
        mark = _unused_mark(self.text)
        ends = (0, *self.quoted_at), (*self.quoted_at, len(self.text))
        marked = mark.join(self.text[start:end] for start, end in zip(*ends, strict=True))
        [encoded] = backend.encode_batch([marked], add_special_tokens=False)  # without the GIL
        pairs = zip(encoded.ids, encoded.offsets, strict=True)
        return [token_id for token_id, (start, end) in pairs if marked[start:end] != mark]


class ControlTokens:
    """Texts that a tokenizer reads as control tokens.

    of_turns: those around messages of users and systems. others: those that the assistant may write
    in its answer, such as marks of reasoning or of calls; clients may send them back.
    """

    def __init__(self, of_turns: Iterable[str], others: Iterable[str]) -> None:
        of_turns = frozenset(of_turns)
        self._of_turns, self._all = _pattern(of_turns), _pattern(of_turns.union(others))

    def render(self, chat: Conversation, render: Callable[[Conversation], str]) -> RenderedChat:
        """Return what `render` makes of a chat, with the places of control tokens in its texts.

        Raises InvalidValueError for a chat that is nested too deeply.
        """
        trusted = _TRUSTED_ROLES if chat.trusts_system else ()
        try:
            mark = _unused_mark(chat)
            turns = tuple(self._with_marks(turn, mark, trusted) for turn in chat.messages)
            tools = tuple(_marked(each, self._all, mark) for each in chat.tools)
        except RecursionError as error:
            limit = "nested less deeply"
            raise InvalidValueError("messages", f"{len(chat.messages)} given", limit) from error
        parts = render(replace(chat, messages=turns, tools=tools)).split(mark)
        *places, _ = accumulate(map(len, parts))
        return RenderedChat("".join(parts), tuple(places))

    def _with_marks(
        self, turn: Mapping[str, Any], mark: str, trusted: Sequence[str]
    ) -> Mapping[str, Any]:
        role = turn.get("role")
        if role in trusted:
            return turn
        pattern = self._of_turns if role == "assistant" else self._all
        return {
            name: value if name == "role" else _marked(value, pattern, mark)
            for name, value in turn.items()
        }


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return what matches the first character of each text, also of one that overlaps another."""
    rests = defaultdict[str, list[str]](list)
    for each in sorted(texts):
        if len(each) > 1:
            rests[re.escape(each[0])].append(re.escape(each[1:]))
    firsts = (f"{first}(?={'|'.join(others)})" for first, others in rests.items())
    return re.compile("|".join(firsts) or "(?!)")


def _marked(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """Return a value of JSON with a mark after what a pattern matches."""
    if isinstance(value, str):
        return pattern.sub(rf"\g<0>{mark}", value)
    if isinstance(value, Mapping):
        return {_marked(name, pattern, mark): _marked(value[name], pattern, mark) for name in value}
    if isinstance(value, list | tuple):
        return [_marked(each, pattern, mark) for each in value]
    return value


def _unused_mark(value: object) -> str:
    """Return a mark that no text of a value contains; if they contain all, the first."""
    text = value if isinstance(value, str) else repr(value)
    return next((each for each in _MARKS if each not in text), _MARKS[0])
