"""Registry of the supported architectures: a new one is an entry here and a module.

Importing this module does not import torch: a decoder class is imported when a model is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """One architecture of Hugging Face.

    decoder: the class that implements it, as "module:class".
    config_defaults: values of keys that config.json may omit, other than zero, false and null.
    """

    decoder: str
    config_defaults: Mapping[str, Any] = field(default_factory=dict)

    def load_decoder(self) -> Any:
        """Import the decoder class."""
        module, _, name = self.decoder.partition(":")
        return getattr(importlib.import_module(module), name)


_LLAMA_DECODER = "specdec.models.llama:CausalDecoder"
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(_LLAMA_DECODER),
        "MistralForCausalLM": Architecture(
            _LLAMA_DECODER, {"num_key_value_heads": 8, "sliding_window": 4096}
        ),
        "Qwen2ForCausalLM": Architecture(_LLAMA_DECODER, _QWEN_DEFAULTS),
        "Qwen3ForCausalLM": Architecture(_LLAMA_DECODER, {**_QWEN_DEFAULTS, "head_dim": 128}),
    }
)
"""The architectures by the name that config.json has for them."""

SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)

SAME_DECODERS: Mapping[str, str] = MappingProxyType({"MiMoForCausalLM": "Qwen2ForCausalLM"})
"""Architectures whose decoder is that of another one: they add only layers for drafting."""
