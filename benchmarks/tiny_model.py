"""Random Llamas with a tokenizer, for checks that need a model but no meaningful text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def write_tiny_llama(directory: Path) -> Path:
    """Write the model in Hugging Face layout, deterministically; return `directory`.

    Nine query heads on three KV heads, a vocabulary of the 256 bytes and 2 special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<|begin|>", "<|end|>"]
    vocabulary = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {token: index for index, token in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=specials[0], eos_token=specials[1]
    ).save_pretrained(directory)
    config = LlamaConfig(
        hidden_size=288,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=32,
        intermediate_size=512,
        vocab_size=len(vocabulary),
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.06,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


def write_deepened(directory: Path, source: Path, num_layers: int) -> Path:
    """Write a model with `num_layers` more layers that change nothing; return `directory`.

    It has the tokens of `source` at a higher price: the layers write zeros to the residual stream.
    """
    tensors, config = _read(source)
    first, prefix = config["num_hidden_layers"], "model.layers.0."
    for name, tensor in list(tensors.items()):
        if name.startswith(prefix):
            own = name.removeprefix(prefix)
            writes = own.endswith(("o_proj.weight", "down_proj.weight"))
            for layer in range(first, first + num_layers):
                value = torch.zeros_like(tensor) if writes else tensor.clone()
                tensors[f"model.layers.{layer}.{own}"] = value
    return _write(directory, source, tensors, {**config, "num_hidden_layers": first + num_layers})


def write_disturbed(directory: Path, source: Path, share: float) -> Path:
    """Write a model whose matrices have noise of a share of their deviation; return `directory`."""
    tensors, config = _read(source)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor + share * tensor.std() * noise
    return _write(directory, source, tensors, config)


def _read(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the configuration of a model."""
    return load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())


def _write(
    directory: Path, source: Path, tensors: dict[str, Tensor], config: dict[str, Any]
) -> Path:
    """Write a model beside the tokenizer of `source`."""
    shutil.copytree(source, directory)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory
