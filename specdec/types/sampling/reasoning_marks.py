"""The marks around a model's reasoning before a constrained text."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types.errors import InvalidValueError
from specdec.types.validation import check_texts, check_types, require_count

MAX_MARKS = 16
MAX_MARK_CHARS = 256


@dataclass(frozen=True)
class ReasoningMarks:
    """Marks of the reasoning before a constrained text. The reasoning is any text.

    openings: marks that begin reasoning at the beginning of an output, or after white space there.
    closings: marks, at least one, of which the first in the reasoning ends it. begins_inside:
    whether an output begins within reasoning; otherwise it is reasoning only after an opening mark.
    """

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    begins_inside: bool = False

    def __post_init__(self) -> None:
        prefix = "structured_output.reasoning."
        check_types(self, prefix)
        check_texts(f"{prefix}openings", self.openings, MAX_MARKS, MAX_MARK_CHARS)
        check_texts(f"{prefix}closings", self.closings, MAX_MARKS, MAX_MARK_CHARS)
        require_count(f"{prefix}closings", len(self.closings), 1, MAX_MARKS, "strings")
        for index, text in enumerate(self.openings):
            if text != text.lstrip():
                limit = "without white space at its beginning: there may be some before a mark"
                raise InvalidValueError(f"{prefix}openings[{index}]", text, limit)
