"""Values in Python's syntax, as some models write arguments. Nothing is evaluated."""

from __future__ import annotations

import ast
import json
from typing import Any

_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's constants, which models mix in."""


class _Constants(ast.NodeTransformer):
    """Replaces JSON's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def literal(value: ast.expr) -> Any:
    """Return a literal. Raise ValueError or TypeError for anything else."""
    return ast.literal_eval(_Constants().visit(value))


def literal_or_none(text: str) -> Any:
    """Return the list or the object that a text is; None if it is none that JSON can express."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        value = literal(ast.parse(text.strip(), mode="eval").body)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list | dict) else None
