"""Receipts of answers: their statements and signatures.

What replays the tokens of a receipt belongs in `specdec.llm.receipts`; the format is in
`specdec.types.reports.receipts`.
"""
