"""A list of the tokens that may be drafted: a smaller output head costs less in each draft.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856) keeps the most frequent tokens. The target verifies
with its whole vocabulary, so the list changes how many drafts are accepted, never the output.
"""

from __future__ import annotations

import json
from pathlib import Path

from specdec.types.errors import InvalidValueError

TOKEN_MAP_KEY = "speculative_config.speculative_token_map"
TOKEN_MAP_FILE = "token_map.json"
"""The list of a draft model, in its directory."""


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


def token_map_of(directory: Path, given: str | None, vocab_size: int) -> tuple[int, ...] | None:
    """Return the tokens that the draft model in a directory may draft; None for all.

    given: a file of `read_token_map` that replaces the directory's own. Raises as it does.
    """
    own = directory / TOKEN_MAP_FILE
    path = given or (str(own) if own.is_file() else None)
    return None if path is None else read_token_map(path, vocab_size)
