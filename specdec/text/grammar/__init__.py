"""Holds outputs to a JSON schema, a regular expression, a grammar or a choice, token by token.

A `GrammarCompiler` makes a `Grammar` of what a request asks for; each of the request's sequences
gets a `GrammarMatcher` of it, which says after every token which ones may come next.
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
