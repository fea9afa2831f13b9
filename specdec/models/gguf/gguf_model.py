"""Configuration and plan of the tensors of a converted file; refuses what is not understood."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.models.gguf.families import (
    FAMILIES,
    IGNORED_KEYS,
    IGNORED_PREFIXES,
    TOKENIZER_KEYS,
    GGUFFamily,
)
from specdec.models.gguf.header import GGUFHeader
from specdec.models.gguf.rope import FACTOR_TENSORS, KEYS, rope_parameters
from specdec.types.errors import UnsupportedModelError

_HEAD_KEYS = frozenset(
    f"attention.{each}" for each in ("head_count_kv", "key_length", "value_length")
) | {"rope.dimension_count"}
_LOCAL_THETA = "rope.freq_base_swa"
_EMBEDDINGS, _LM_HEAD = "token_embd.weight", "output.weight"
_MAX_LAYERS = 10_000
_TEXT_KEYS = (".rope.scaling.type", ".tensor_data_layout")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endofturn|>", "<end_of_turn>"}
    | {"<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]"}
)
"""Tokens that end a turn or a text by their name, as in llama.cpp.

Older files lack eot_token_id, and chat models have a turn's end as eos_token_id alone.
"""


def family_of(header: GGUFHeader) -> GGUFFamily:
    """Return the family of a file. Raises UnsupportedModelError for another architecture."""
    family = FAMILIES.get(header.architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        found = f"GGUF architecture {header.architecture[:100]!r}"
        raise UnsupportedModelError(f"{found} is not supported; supported: {known}")
    return family


@dataclass(frozen=True)
class GGUFModel:
    """A file whose keys and tensors are all understood. keys: without the architecture's prefix."""

    header: GGUFHeader
    family: GGUFFamily
    keys: Mapping[str, Any]

    @classmethod
    def of(cls, header: GGUFHeader) -> GGUFModel:
        """Return the model of a file.

        Raises UnsupportedModelError, with their names, for keys and tensors that are not
        understood, and for tensors that are missing.
        """
        family, prefix = family_of(header), f"{header.architecture}."
        keys = {
            name.removeprefix(prefix): _number(name, _scalar(name, value))
            for name, value in header.metadata.items()
            if name.startswith(prefix)
        }
        model = cls(header, family, keys)
        model._check_keys()
        model._check_tensors()
        return model

    @property
    def is_tied(self) -> bool:
        """True where the output head is the embedding matrix."""
        return _LM_HEAD not in self.header.tensors

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self._size("block_count")

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self._size("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        given = self.keys.get("attention.head_count_kv")
        return self.num_heads if given is None else self._size("attention.head_count_kv")

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        if self.keys.get("attention.key_length"):
            return self._size("attention.key_length")
        width = self._size("embedding_length")
        if width < self.num_heads:
            raise self._unsupported("attention.head_count", self.num_heads, f"at most {width}")
        return width // self.num_heads

    def names(self) -> dict[str, str]:
        """Return the name in Hugging Face files of each tensor that the family has."""
        final = {f"output_norm.{each}": f"model.norm.{each}" for each in self.family.final_norm}
        names = {_EMBEDDINGS: "model.embed_tokens.weight", **final}
        if not self.is_tied:
            names[_LM_HEAD] = "lm_head.weight"
        layer = {**self.family.layer, **(self.family.biases[1] if self._has_biases else {})}
        for index in range(self.num_layers):
            for name, other in layer.items():
                names[f"blk.{index}.{name}"] = f"model.layers.{index}.{other}"
        return names

    def config(self, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Return config.json without a dtype. factors: of rope, by the tensors' names."""
        family, keys = self.family, self.keys
        known, ends = {**family.required, **family.optional}, self.end_token_ids()
        config = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **family.constants,
            **{other: keys[name] for name, other in known.items() if _is_set(keys.get(name))},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.header.tensors[_EMBEDDINGS].shape[0],
            "tie_word_embeddings": self.is_tied,
            "eos_token_id": ends[0] if len(ends) == 1 else ends,
            "bos_token_id": self.header.metadata.get("tokenizer.ggml.bos_token_id"),
            **self._rope(factors),
        }
        if family.biases[0]:
            config[family.biases[0]] = self._has_biases
        if family.large:
            is_large = self.num_layers == family.large
            width = config["hidden_size"] // self.num_heads if is_large else self.head_dim
            config["query_pre_attn_scalar"] = width
        return config

    def end_token_ids(self) -> list[int]:
        """Return the tokens that end a text: of keys, and by their name, whatever their type.

        Fine-tunes add such tokens that are not control tokens.
        """
        metadata = self.header.metadata
        given = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
        tokens = metadata.get("tokenizer.ggml.tokens") or ()
        named = (index for index, token in enumerate(tokens) if token in _ENDS)
        return list(dict.fromkeys([*(each for each in given if each is not None), *named]))

    @property
    def _has_biases(self) -> bool:
        return any(f"blk.0.{name}" in self.header.tensors for name in self.family.biases[1])

    def _rope(self, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        found = rope_parameters(self.keys, factors)
        if self.family.is_partly_rotated:
            rotated = self.keys.get("rope.dimension_count") or self.head_dim
            found["partial_rotary_factor"] = rotated / self.head_dim
        if not self.family.has_local_rope:
            # Beside the parameters it wins over the default of a family, as does null.
            name = "original_max_position_embeddings"
            return {"rope_parameters": found, name: found.get(name)}
        local = {"rope_type": "default", "rope_theta": self.keys.get(_LOCAL_THETA) or 10_000.0}
        return {"rope_parameters": {"full_attention": found, "sliding_attention": local}}

    def _check_keys(self) -> None:
        family = self.family
        missing = [key for key in family.required if not self.keys.get(key)]
        if missing:
            raise UnsupportedModelError(f"the GGUF file lacks {self._full(missing[0])}")
        known = {*family.required, *family.optional, *KEYS, *IGNORED_KEYS, *_HEAD_KEYS}
        known |= {_LOCAL_THETA} if family.has_local_rope else set()
        expected: dict[str, int] = {
            "attention.causal": True,
            "attention.value_length": self.head_dim,
        }
        if not family.is_partly_rotated:
            expected["rope.dimension_count"] = self.head_dim
        for key, value in self.keys.items():
            limit = expected.get(key)
            if value and key not in known and key not in expected:
                raise self._unsupported(key, value, "absent or 0: it is not understood")
            if limit is not None and value != limit and (value or key == "attention.causal"):
                raise self._unsupported(key, value, f"{limit}")
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        keys = {each for each in self.header.metadata if each.startswith("tokenizer.")}
        unknown = sorted(each for each in keys - TOKENIZER_KEYS if not _is_ignored(each))
        if unknown:
            listed = _listed(unknown)
            raise UnsupportedModelError(f"keys of the GGUF file are not understood: {listed}")
        for name in sorted(keys - {each for each in keys if _is_ignored(each)}):
            value, kind = self.header.metadata[name], _kind_of_tokenizer(name)
            if type(value) is not kind:
                found = f"{name} of the GGUF file has the type {type(value).__name__}"
                raise UnsupportedModelError(f"{found}; it must be {kind.__name__}")

    def _check_tensors(self) -> None:
        names, found = self.names().keys(), self.header.tensors.keys()
        if missing := sorted(names - found):
            raise UnsupportedModelError(f"the GGUF file lacks {_listed(missing)}")
        if unknown := sorted(found - names - {*FACTOR_TENSORS}):
            listed = _listed(unknown)
            raise UnsupportedModelError(f"tensors of the GGUF file are not understood: {listed}")

    def _size(self, key: str) -> int:
        value, most = self.keys[key], _MAX_LAYERS if key == "block_count" else 2**31
        if type(value) is not int or not 0 < value <= most:
            raise self._unsupported(key, value, f"a whole number from 1 to {most}")
        return value

    def _full(self, key: str) -> str:
        return f"{self.header.architecture}.{key}"

    def _unsupported(self, key: str, value: object, limit: str) -> UnsupportedModelError:
        shown = str(value)[:100]
        return UnsupportedModelError(
            f"{self._full(key)} of the GGUF file is {shown}; it must be {limit}"
        )


def _scalar(name: str, value: Any) -> Any:
    """Return a value; of a list with one for each layer, the one that all have."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise UnsupportedModelError(f"{name} of the GGUF file differs by layer")
    return value[0]


def _is_set(value: object) -> bool:
    """Return whether a key has a value; 0 means that it has none."""
    return bool(value) or value is False


def _number(name: str, value: Any) -> Any:
    """Return a value that is a finite number of at least 0, or a text where the key has one."""
    is_text = name.endswith(_TEXT_KEYS)
    if isinstance(value, str) if is_text else _is_size(value):
        return value
    limit = "a text" if is_text else "a finite number of at least 0"
    raise UnsupportedModelError(
        f"{name} of the GGUF file is {str(value)[:100]}; it must be {limit}"
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _kind_of_tokenizer(name: str) -> type:
    """Return the type of a key about the tokenizer."""
    last = name.rpartition(".")[2]
    if last in ("model", "pre"):
        return str
    if last.startswith("add_"):
        return bool
    return list if last in ("tokens", "scores", "token_type", "merges") else int


def _is_ignored(key: str) -> bool:
    return key.startswith(IGNORED_PREFIXES)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
