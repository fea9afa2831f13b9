"""A list of the tokens that a head may draft: a smaller output head costs less in each draft.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856) keeps the most frequent tokens. The target verifies
with its whole vocabulary, so the list changes how many drafts are accepted, never the output.
"""

from __future__ import annotations

import json
from pathlib import Path

from specdec.models.heads.formats.dflash import DFlashShape
from specdec.models.heads.formats.eagle3 import Eagle3Shape
from specdec.models.heads.formats.medusa import MedusaShape
from specdec.models.heads.formats.shape import HeadShape
from specdec.types.errors import InvalidValueError

TOKEN_MAP_KEY = "speculative_config.speculative_token_map"


def read_token_map(path: str, vocab_size: int) -> tuple[int, ...]:
    """Return the target's token ids in a JSON file, ascending, each once.

    Raises InvalidValueError unless the file is a list with one id or more below `vocab_size`.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        limit = f"a JSON file with a list of token ids ({error})"
        raise InvalidValueError(TOKEN_MAP_KEY, path, limit) from None
    if not isinstance(found, list) or not found:
        raise InvalidValueError(TOKEN_MAP_KEY, path, "a JSON file with a list of token ids")
    for each in found:
        if type(each) is not int or not 0 <= each < vocab_size:
            limit = f"a list of token ids from 0 to {vocab_size - 1} (it has {each!r})"
            raise InvalidValueError(TOKEN_MAP_KEY, path, limit)
    return tuple(sorted(set(found)))


def output_head_names(shape: HeadShape) -> tuple[str, ...]:
    """Return the tensors with a row for each draft token; none if the list cannot select rows."""
    match shape:
        case MedusaShape():
            return shape.lm_head_names
        case Eagle3Shape(has_lm_head=True):
            return ("lm_head.weight",)
        case DFlashShape(has_lm_head=True, markov_rank=0):
            return ("lm_head.weight",)
        case DFlashShape(has_lm_head=True):
            return ("lm_head.weight", "markov_head.markov_w2.weight")
        case _:
            return ()
