"""Which preset `auto` stands for, by a cheap look at what a request asks for."""

from __future__ import annotations

import re

from specdec.sampling_params import AcceptancePreset

MAX_CHARS = 4096
"""So much of a prompt's end is looked at."""

# A fence, or a line that hardly occurs in prose: a definition, an import, an include, or one that
# ends in a semicolon or an opening brace after a bracket.
_CODE = re.compile(
    r"""```
    | ^[ \t]*(?:async[ \t]+)?(?:def|fn|func|function)[ \t]+\w+[ \t]*[(<]
    | ^[ \t]*class[ \t]+\w+[ \t]*(?:\([\w., ]*\))?[ \t]*[:{]
    | ^[ \t]*from[ \t]+[\w.]+[ \t]+import[ \t]
    | ^[ \t]*import[ \t]+[\w.]+(?:[ \t]+as[ \t]+\w+|;)?[ \t]*$
    | ^[ \t]*\#include[ \t]*[<"]
    | ^[ \t]*(?:const|let|var)[ \t]+\w+[ \t]*=
    | [)\]}][ \t]*(?:;|\{)[ \t]*$
    """,
    re.MULTILINE | re.VERBOSE,
)


def preset_for(prompt: str, *, is_structured: bool) -> AcceptancePreset:
    """Medium for structured output, strict for a prompt with code in it, lenient for other text.

    is_structured: whether the request says what form its output has to have. Of the prompt only the
    last MAX_CHARS characters count. A question about code that shows none is taken for other text.
    """
    if is_structured:
        return "medium"
    return "strict" if _CODE.search(prompt[-MAX_CHARS:]) else "lenient"
