"""A random Llama with a tokenizer, for checks that need a model but no meaningful text."""

from __future__ import annotations

from pathlib import Path

import torch


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
