"""Names that texts about other versions and systems show, and what they are called here."""

from __future__ import annotations

from typing import NoReturn

_SPELLINGS = {
    "agenerate": "AsyncLLM(...).generate, which streams: async for output in llm.generate(...)",
    "generate_async": "AsyncLLM(...).generate, which streams",
    "stream": "AsyncLLM(...).generate, which streams",
    "get_stats": "get_metrics()",
    "metrics": "get_metrics()",
    "close": "shutdown()",
}


def refuse_attribute(of: object, name: str) -> NoReturn:
    """Raises AttributeError for one that an object has not, with the right spelling if known."""
    message = f"{type(of).__name__!r} has no attribute {name!r}"
    if (spelling := _SPELLINGS.get(name)) is not None:
        message += f"; it is {spelling}"
    raise AttributeError(message, name=name, obj=of)
