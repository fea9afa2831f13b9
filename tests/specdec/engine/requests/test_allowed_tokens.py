"""Tokens that remain under combined sampling rules."""

import pytest

from specdec.engine.requests.input_processor import has_allowed_token
from specdec.text.grammar.matcher import mask_words
from specdec.types.sampling.sampling_spec import SamplingRules

VOCAB_SIZE = 40


@pytest.mark.parametrize(
    ("rules", "grammar", "expected"),
    [
        ({}, None, True),
        ({"allowed_token_ids": (7,)}, None, True),
        ({"allowed_token_ids": (7,)}, (7, 39), True),
        ({"allowed_token_ids": (7,)}, (6, 39), False),
        ({"allowed_token_ids": (7,), "bad_words": ((7,),)}, None, False),
        ({"allowed_token_ids": (7,), "bad_words": ((3, 7),)}, None, False),
        ({"allowed_token_ids": (7,), "bad_words": ((2, 3, 7),)}, None, True),
        ({"allowed_token_ids": (7,), "bad_words": ((9, 3, 7),)}, None, True),
        ({"allowed_token_ids": (7,), "bad_words": ((1,) * 9 + (7,),)}, None, True),
        ({"allowed_token_ids": (7,), "end_token_ids": (7,), "min_tokens": 2}, None, False),
        ({"allowed_token_ids": (7,), "end_token_ids": (7,), "min_tokens": 1}, None, True),
        ({"end_token_ids": (7,), "min_tokens": 2}, (7,), True),
        ({"bad_words": tuple((token,) for token in range(VOCAB_SIZE))}, None, False),
    ],
)
def test_combined_rules(rules, grammar, expected):
    """After tokens 1, 2 and 3, of which the last is output."""
    mask = None if grammar is None else mask_words(grammar, VOCAB_SIZE)
    assert has_allowed_token(SamplingRules(**rules), [1, 2, 3], 1, VOCAB_SIZE, mask) is expected
