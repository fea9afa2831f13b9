"""The tokenizer of a GGUF file: that of transformers, and what it leaves out of the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.types.errors import UnsupportedModelError

_SPACE = "\u2581"
_TOOL_TEMPLATE = "tokenizer.chat_template.tool_use"
_DEFAULT_PRE = "default"
_GPT2_PRE = (_DEFAULT_PRE, "gpt-2")
_DIGITS_PRE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""GPT-2's pattern, after each digit is split off."""

_DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""Patterns of llama.cpp for a file that names none, or `default`; each splits what others left."""

_WHOLE_WORDS_PRE = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "tekken",
)
"""Words in the vocabulary are not merged; a prompt begins with BOS unless the file denies it."""


def convert_tokenizer(path: Path, metadata: Mapping[str, Any], *, splits_digits: bool) -> Any:
    """Return the tokenizer as one of transformers.

    splits_digits: whether each digit is a piece, whatever the file names.
    Raises UnsupportedModelError for a kind or a pattern of splitting that is not known.
    """
    kind, pre = (metadata.get(f"tokenizer.ggml.{each}") for each in ("model", "pre"))
    _require_known(kind, pre)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if kind == "gpt2":
        if not splits_digits and pre in (None, "", _DEFAULT_PRE):
            _split_by_default(tokenizer.backend_tokenizer)
        _adjust_bytes(tokenizer, metadata, splits_digits=splits_digits or pre in _DIGITS_PRE)
    elif metadata.get("tokenizer.ggml.add_space_prefix") is False:
        _leave_out_prefix(tokenizer.backend_tokenizer)
    if isinstance(for_tools := metadata.get(_TOOL_TEMPLATE), str):
        templates = {"default": tokenizer.chat_template, "tool_use": for_tools}
        tokenizer.chat_template = {name: text for name, text in templates.items() if text}
    return tokenizer


def _require_known(kind: object, pre: object) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if kind not in ("gpt2", "llama"):
        raise _unsupported("tokenizer.ggml.model", kind, "gpt2 or llama")
    known = {*GGUF_PRE_TOKENIZER_SPLITS, *_GPT2_PRE, *_DIGITS_PRE, *_WHOLE_WORDS_PRE}
    if kind == "gpt2" and pre and pre not in known:
        raise _unsupported("tokenizer.ggml.pre", pre, f"one of {', '.join(sorted(known))}")


def _adjust_bytes(tokenizer: Any, metadata: Mapping[str, Any], *, splits_digits: bool) -> None:
    from tokenizers.pre_tokenizers import Digits, Sequence

    backend = tokenizer.backend_tokenizer
    if splits_digits:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    if metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_PRE:
        backend.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in metadata and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True


def _split_by_default(backend: Any) -> None:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    splits = [Split(Regex(each), behavior="isolated") for each in _DEFAULT_SPLITS]
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = Sequence([*splits, to_bytes])


def _leave_out_prefix(backend: Any) -> None:
    """Encode texts without a space before them, and decode them without dropping one."""
    from tokenizers import decoders, normalizers

    if backend.normalizer is None:
        backend.pre_tokenizer.prepend_scheme = "never"
    else:  # of Phi-3 and Gemma
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _unsupported(key: str, value: object, limit: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{key} of the GGUF file is {str(value)[:100]}; it must be {limit}"
    )
