"""Structured output.

Constrains an output to a JSON schema, a regular expression, a grammar or a choice, token by token.
A `GrammarCompiler` compiles a request's constraint to a `Grammar`; each sequence has its own
`GrammarMatcher`, which computes the tokens that are allowed next. Applying the resulting bitmask to
logits belongs in `sampling`.
"""
