"""Verification of receipts: a pass over prompt and output finds the tokens that a model samples.

`engine_replay` runs this project's model, `transformers_replay` that of transformers. Statements,
signatures and reports belong in `specdec.engine.receipts`.
"""
