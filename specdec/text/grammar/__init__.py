"""Structured output.

Holds an output to a JSON schema, a regular expression, a grammar or a choice, token by token. A
`GrammarCompiler` turns a request's constraint into a `Grammar`; every sequence gets a
`GrammarMatcher` of it, which computes the tokens that may follow. Applying the resulting bitmask to
logits belongs in `sampling`.
"""

from specdec.text.grammar.compiler import BUSY, COMPILE_TIMEOUT_S, GrammarCompiler
from specdec.text.grammar.constraint import ConstrainedDraft, OutputConstraint
from specdec.text.grammar.matcher import Grammar, GrammarMatcher

__all__ = [
    "BUSY",
    "COMPILE_TIMEOUT_S",
    "ConstrainedDraft",
    "Grammar",
    "GrammarCompiler",
    "GrammarMatcher",
    "OutputConstraint",
]
