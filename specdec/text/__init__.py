"""Between text and token ids.

Tokenizer, incremental detokenizer, chat template, the bytes of a vocabulary, and grammars. Sampling
from what a grammar allows belongs in `sampling`, drafting across vocabularies in
`speculation.proposers.cross_vocab`.
"""
