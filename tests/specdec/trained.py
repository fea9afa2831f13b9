"""Small models that are trained on a text, with different kinds of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WINDOW_TOKENS = 48
BATCH = 8


def byte_level(text: str, vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer, like GPT-2's, without a beginning-of-sequence token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<end>"]
    _train(backend, text, vocab, special, pre_tokenizers.ByteLevel.alphabet())
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def sentencepiece(text: str, vocab: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer like Llama 2's: U+2581 for spaces, a space prefix, and byte fallback."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # Split words for training, like SentencePiece; the finished tokenizer needs no such rule.
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    _train(backend, text, vocab, special, [])
    plain = Tokenizer.from_str(_without_byte_tokens_as_special(backend.to_str()))
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def trained_llama_dir(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    *,
    num_steps: int,
    hidden: int = 64,
    padded_to: int = 0,
    seed: int = 0,
) -> Path:
    """Write a Llama of two layers that is trained on windows of `text` for `num_steps` steps."""
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        intermediate_size=2 * hidden,
        vocab_size=max(len(tokenizer), padded_to),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
        _fit(model, tokenizer, text, num_steps)
    model.save_pretrained(directory)
    return directory


def _fit(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str, num_steps: int
) -> None:
    token_ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    first = tokenizer.encode("a")[:1] if tokenizer.bos_token_id is not None else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=num_steps)
    for _ in range(num_steps):
        starts = torch.randint(0, len(token_ids) - WINDOW_TOKENS, (BATCH,))
        windows = torch.stack([token_ids[start : start + WINDOW_TOKENS] for start in starts])
        windows = torch.cat([torch.tensor(first * BATCH).long().view(BATCH, -1), windows], dim=1)
        model(input_ids=windows, labels=windows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _train(
    backend: Tokenizer, text: str, vocab: int, special: list[str], alphabet: list[str]
) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(text.splitlines(keepends=True), trainer)
    assert backend.get_vocab_size() == vocab, f"the text is too short for a vocabulary of {vocab}"


def _without_byte_tokens_as_special(raw: str) -> str:
    parsed = json.loads(raw)
    parsed["pre_tokenizer"] = None
    parsed["added_tokens"] = [
        each for each in parsed["added_tokens"] if not each["content"].startswith("<0x")
    ]
    return json.dumps(parsed)
