"""Whether what a request allows and forbids leaves any token: for an error that says whose fault.

Workers shape logits by the same rules (`sampling/shaping.py`); this is asked once, when a request
could not go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.sampling_rules import SamplingRules


def leaves_any(
    rules: SamplingRules,
    token_ids: Sequence[int],
    num_output_tokens: int,
    vocab_size: int,
    grammar_mask: NDArray[np.int32] | None,
) -> bool:
    """Whether a token may follow `token_ids`, of which the last so many are output.

    grammar_mask: int32 [ceil(vocab_size / 32)], as in StepRow; None allows all.
    """
    may_come = _allowed(rules, vocab_size)
    if grammar_mask is not None:
        bits = np.unpackbits(grammar_mask.view(np.uint8), bitorder="little")
        may_come &= bits[:vocab_size].astype(bool)
    for word in rules.bad_words:
        before = word[:-1]
        if tuple(token_ids[len(token_ids) - len(before) :]) == before:
            may_come[word[-1]] = False
    # A grammar's mask has min_tokens in it: an end that nothing else can replace goes before them.
    if grammar_mask is None and num_output_tokens < rules.min_tokens:
        may_come[list(rules.end_token_ids)] = False
    return bool(may_come.any())


def _allowed(rules: SamplingRules, vocab_size: int) -> NDArray[np.bool_]:
    if rules.allowed_token_ids is None:
        return np.ones(vocab_size, dtype=bool)
    allowed = np.zeros(vocab_size, dtype=bool)
    allowed[list(rules.allowed_token_ids)] = True
    return allowed
