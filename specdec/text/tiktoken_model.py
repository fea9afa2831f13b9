"""Tokenizers of tiktoken.model, which Kimi K2, Kimi Linear and Moonlight have alone.

The file has the rank of each token; the pattern that splits a text is in code of the repository,
which is never run. It is known for one class of tokenizer.
"""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.text.byte_level import token_of_bytes
from specdec.types.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

TIKTOKEN_MODEL = "tiktoken.model"
TIKTOKEN_CLASS = "TikTokenTokenizer"
_MAX_ADDED = 16_384  # ids after the ranks; Kimi K2 has 256
_MAX_TOKEN_BYTES = 1024  # the merges of a token are found in quadratic time
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)
"""The pattern of TIKTOKEN_CLASS, by tokenization_kimi.py of moonshotai/Kimi-K2-Instruct."""

_SMALL_FILES = ("*.json", "*.jinja", "additional_chat_templates")


@contextmanager
def with_tokenizer_json(directory: Path) -> Iterator[Path]:
    """Yield the directory if its tokenizer is in other files, else one with a tokenizer.json.

    The latter is temporary. Raises UnsupportedModelError for ranks without a known pattern, and
    ValueError for other content than ranks.
    """
    ranks = sorted({*directory.glob(TIKTOKEN_MODEL), *directory.glob("*.tiktoken")})
    if not ranks or (directory / "tokenizer.json").is_file():
        yield directory
        return
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    if ranks[0].name != TIKTOKEN_MODEL or settings.get("tokenizer_class") != TIKTOKEN_CLASS:
        raise UnsupportedModelError(
            f"{ranks[0].name} has no pattern to split a text by: that is in code of the model, "
            "which is never run; save the tokenizer as tokenizer.json beside it"
        )
    backend = _tokenizer_of(ranks[0], settings.get("added_tokens_decoder") or {})
    with tempfile.TemporaryDirectory() as name:
        for found in (each for pattern in _SMALL_FILES for each in directory.glob(pattern)):
            copy = shutil.copytree if found.is_dir() else shutil.copyfile
            copy(found, Path(name) / found.name)
        backend.save(str(Path(name) / "tokenizer.json"))
        yield Path(name)


def _tokenizer_of(path: Path, added: Mapping[str, Any]) -> Backend:
    """Return the tokenizer; added: objects of tokenizer_config.json, by id.

    Any two tokens that make a third one are a merge, of the third one's rank. tiktoken merges the
    pair with the lowest rank of the result, the first of several: whatever surrounds a token, its
    last pair is that by which it is made alone, so other pairs of it never meet and need no order.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = _ranks(path)
    spelled = {content: token_of_bytes(content) for content in ranks}
    merges = [
        (spelled[content[:cut]], spelled[content[cut:]])
        for content in ranks
        for cut in range(1, len(content))
        if content[:cut] in ranks and content[cut:] in ranks
    ]
    vocabulary = {spelled[content]: rank for content, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, len(ranks), {int(token_id): each for token_id, each in added.items()})
    return backend


def _add_tokens(backend: Backend, num_ranks: int, added: Mapping[int, Mapping[str, Any]]) -> None:
    """Add tokens by id, and reserved ones for the free ids between.

    Raises UnsupportedModelError for a token that would have another id.
    """
    from tokenizers import AddedToken

    limit = num_ranks + _MAX_ADDED
    texts = {token_id: each["content"] for token_id, each in added.items()}
    for token_id in texts:
        if not 0 <= token_id < limit:
            raise _misplaced(texts, token_id, f"from 0 to {limit - 1}")
    for token_id in range(num_ranks, max(texts, default=-1) + 1):
        texts.setdefault(token_id, f"<|reserved_token_{token_id}|>")
    is_special = {token_id: bool(each.get("special", True)) for token_id, each in added.items()}
    backend.add_tokens(
        [
            AddedToken(texts[token_id], normalized=False, special=is_special.get(token_id, True))
            for token_id in sorted(texts)
        ]
    )
    for token_id in sorted(texts):
        if (found := backend.token_to_id(texts[token_id])) != token_id:
            raise _misplaced(texts, token_id, f"the only id of this text (found: {found})")


def _misplaced(texts: Mapping[int, str], token_id: int, limit: str) -> UnsupportedModelError:
    text = texts[token_id]
    return UnsupportedModelError(
        f"the id of added token {text!r} in tokenizer_config.json is {token_id}; it must be {limit}"
    )


def _ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks of the tokens, in their order. Raises ValueError for other content."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    ordered = dict(sorted(ranks.items(), key=lambda item: item[1]))
    if [*ordered.values()] != [*range(len(ordered))]:
        raise ValueError(f"{path.name} does not number its tokens from 0 on")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{path.name} has no token for the byte {missing[0]}")
    if (longest := max(map(len, ranks))) > _MAX_TOKEN_BYTES:
        limit = f"at most {_MAX_TOKEN_BYTES} bytes"
        raise ValueError(f"{path.name} has a token of {longest} bytes; it must have {limit}")
    return ordered
