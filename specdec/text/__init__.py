"""Conversion between text and token ids.

Tokenizer, incremental detokenizer, chat template, the bytes of a vocabulary, and grammars. Applying
the mask of a grammar belongs in `sampling`, drafting across vocabularies in
`speculation.proposers.cross_vocab`.
"""
