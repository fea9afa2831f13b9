"""The tiny tokenizer's vocabulary: reference implementation."""

import numpy as np

VOCAB_SIZE = 400
"""As if the model's vocabulary were padded: the tokenizer has 383 tokens."""

EOS = frozenset({0, 2})
"""<|endoftext|> and <|im_end|>; <|im_start|> is 1."""


class TinyVocabulary:
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.texts = {
            token: tokenizer.decode([token])
            for token in range(3, tokenizer.vocab_size)
            if "�" not in tokenizer.decode([token])
        }

    def encode(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens):
        return self._tokenizer.decode(tokens)

    def starts(self, texts, prefix):
        """Return the tokens that may follow `prefix` in one of `texts`; EOS after a whole text."""
        rests = {text[len(prefix) :] for text in texts if text.startswith(prefix)}
        starts = {
            token
            for token, text in self.texts.items()
            if any(rest.startswith(text) for rest in rests)
        }
        return starts | (EOS if "" in rests else frozenset()), {rest[:1] for rest in rests}


def allowed(mask):
    """Return the tokens whose bits are set."""
    bits = (mask[np.arange(len(mask) * 32) // 32] >> (np.arange(len(mask) * 32) % 32)) & 1
    return set(np.flatnonzero(bits).tolist())


def wander(matcher, rng, count):
    """Advance by `count` random tokens that do not end the text."""
    for _ in range(count):
        matcher.advance(int(rng.choice(sorted(allowed(matcher.allowed_mask()) - EOS))))
