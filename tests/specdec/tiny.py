"""Tiny complete models for tests: random weights, a real tokenizer."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

TEXT = """
The river begins as a thread of cold water under the stones, and by the time it reaches the town
it carries boats. Every spring the people count the days until the ice breaks, and every autumn
they count them again until it forms. "When will it open?" they ask, and nobody knows; in 1987 it
was the 14th of March, in 2003 the 29th. The baker keeps a list of dates above the oven.
def measure(depth, width, speed): return depth * width * speed  # cubic metres a second
The water that was snow in the hills is the water under the bridge, and the water under the bridge
is the water in the sea. Ask the baker, ask the children: the river is older than the town.
Further south the valley widens. Farmers plant barley, lentils and sunflowers between the dykes,
and herons stand motionless in the shallow channels while dragonflies hunt above them. Engineers
from the university installed seventeen gauges along the embankment; each evening a volunteer reads
the numbers aloud over the telephone, patiently, as though telling somebody a bedtime story.
"""
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_llama_dir(
    directory: Path,
    *,
    hidden: int = 144,
    layers: int = 2,
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 16,
    intermediate: int = 200,
    vocab: int = 383,
    max_positions: int = 512,
    tied: bool = True,
    sharded: bool = False,
    seed: int = 0,
) -> Path:
    """Write a random Llama in float32 and its tokenizer to `directory`; return `directory`.

    The defaults have SmolLM2's proportions (three query heads for each KV head) and dimensions that
    are not divisible by three ranks. vocab: 300 to 512. sharded: several weight files and an index.
    """
    tokenizer = train_tokenizer(vocab)
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    random_model(LlamaForCausalLM, config, seed).save_pretrained(
        directory, max_shard_size="200KB" if sharded else "5GB"
    )
    return directory


def random_model(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int
) -> PreTrainedModel:
    """Make a model with well separated logits, whose greedy text has no short cycles.

    With the small initial weights of transformers a tied model repeats its last token, because the
    layers add little to the embedding; with large ones the embedding has no effect.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).float().eval()
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                fan_in = weight.shape[-1]
                gain = 0.3 if "embed" in name or "lm_head" in name else 2 / fan_in**0.5
                torch.nn.init.normal_(weight, std=gain)
            elif name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.3)
            else:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def train_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT.splitlines(), trainer)
    assert backend.get_vocab_size() == vocab, f"the text is too short for a vocabulary of {vocab}"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=TURN_START,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
    )


def shuffled_llama_dir(source: Path, directory: Path) -> Path:
    """Write the model in `source`, whose embedding is tied, with permuted token ids."""
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    ids = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(2)).tolist()
    weights["model.embed_tokens.weight"] = embedding[torch.tensor(ids).argsort()]
    for path in source.glob("*.json"):
        shutil.copy(path, directory)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: ids[old] for token, old in vocabulary.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] = ids[token["id"]]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def disturbed_llama_dir(source: Path, directory: Path, share: float = 0.1) -> Path:
    """Write the model in `source` with noise added: `share` of the weights' standard deviation.

    Tensors of one weight, which have none, are copied.
    """
    for path in source.glob("*.json"):
        shutil.copy(path, directory)
    generator = torch.Generator().manual_seed(6)
    weights = {
        name: weight + share * weight.std() * torch.randn(weight.shape, generator=generator)
        if weight.numel() > 1
        else weight
        for name, weight in sorted(load_file(source / "model.safetensors").items())
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def renamed_dtype_dir(source: Path, directory: Path, **names: str | None) -> Path:
    """Copy a model, with `names` as the only dtype keys of config.json."""
    shutil.copytree(source, directory)
    path = directory / "config.json"
    content = json.loads(path.read_text())
    left = {key: value for key, value in content.items() if key not in ("dtype", "torch_dtype")}
    path.write_text(json.dumps(left | names))
    return directory


def llama2_like_tokenizer() -> PreTrainedTokenizerFast:
    """Return a SentencePiece-like one: a marker for spaces, and a token for every byte."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁river", "s"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
