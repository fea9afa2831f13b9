"""Tokens that end a text: all that the files of a model name, as in vLLM.

A fine-tune may name its end token in the tokenizer alone, or a chat model its end of a turn in
generation_config.json alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.config.engine import ModelOptions
from specdec.config.hf_overrides import with_overrides
from specdec.config.json_values import unsupported
from specdec.models.config.config_files import (
    GENERATION_CONFIG,
    read_generation_config,
    read_json,
)
from specdec.types.errors import UnsupportedModelError, reason_of

_CONFIG = "config.json"
_TOKENIZER, _SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"


def read_end_tokens(directory: Path, options: ModelOptions) -> dict[int, tuple[str, ...]]:
    """Return the tokens that end a text by the files of a model directory, each with the files."""
    raw = with_overrides(read_json(directory / _CONFIG) or {}, options.overrides)
    return find_end_tokens(directory, raw, read_generation_config(directory, options))


def find_end_tokens(
    directory: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[int, tuple[str, ...]]:
    """Return the tokens that end a text, each with the files that name it.

    raw, generation: config.json and generation_config.json of the directory.
    """
    nested = raw.get("text_config")
    text = nested if isinstance(nested, dict) else {}
    named = {
        GENERATION_CONFIG: _token_ids(generation, GENERATION_CONFIG),
        _CONFIG: _token_ids(raw, _CONFIG) | _token_ids(text, _CONFIG),
    }
    token_id = read_tokenizer_end(directory)
    named[_TOKENIZER] = frozenset() if token_id is None else frozenset((token_id,))
    found = sorted(frozenset().union(*named.values()))
    return {each: tuple(name for name, ids in named.items() if each in ids) for each in found}


def unused_end_tokens(named: Mapping[int, Sequence[str]], vocab_size: int) -> str | None:
    """Return a note on the end tokens outside the vocabulary; None without such."""
    unused = [
        f"{token_id} ({', '.join(files)})"
        for token_id, files in named.items()
        if not 0 <= token_id < vocab_size
    ]
    if not unused:
        return None
    return f"no text ends at {', '.join(unused)}: the vocabulary has {vocab_size} tokens"


def read_tokenizer_end(directory: Path) -> int | None:
    """Return the end-of-sequence token of the tokenizer in a directory, if its files name one.

    Raises UnsupportedModelError for files that are not a tokenizer's.
    """
    try:
        return _tokenizer_end(directory)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        message = f"{directory} has invalid files of a tokenizer ({reason_of(error)})"
        raise UnsupportedModelError(message) from error


def _tokenizer_end(directory: Path) -> int | None:
    settings = read_json(directory / _TOKENIZER) or {}
    token = _content(settings.get("eos_token"))
    if token is None:
        special = read_json(directory / _SPECIAL_TOKENS) or {}
        token = _content(special.get("eos_token"))
    if token is None:
        return None
    added = settings.get("added_tokens_decoder")
    ids = {_content(each): key for key, each in added.items()} if isinstance(added, dict) else {}
    return int(ids[token]) if token in ids else _id_in_vocabulary(directory, token)


def _token_ids(values: Mapping[str, Any], file: str) -> frozenset[int]:
    eos = values.get("eos_token_id")
    token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(each) is int for each in token_ids):
        raise unsupported("eos_token_id", eos, "a token id, or a list of them", file)
    return frozenset(token_ids)


def _content(token: object) -> str | None:
    """Return the text of a token, which files have alone or as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _id_in_vocabulary(directory: Path, token: str) -> int | None:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    for each in _added_tokens(path.read_text()):
        if each["content"] == token:
            return int(each["id"])
    vocabulary = (read_json(path) or {}).get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # a unigram model: (token, score) by token id
        return next((i for i, (text, _) in enumerate(vocabulary) if text == token), None)
    found = vocabulary.get(token)
    return None if found is None else int(found)


def _added_tokens(text: str) -> list[Any]:
    """Return the added tokens of a tokenizer.json, which precede the megabytes of its vocabulary.

    Reading them alone saves a fraction of a second in each process.
    """
    begin = text.find("[", text.find('"added_tokens"')) if '"added_tokens"' in text else -1
    return [] if begin < 0 else list(json.JSONDecoder().raw_decode(text, begin)[0])
