"""Tiny models of several families as GGUF files, written as llama.cpp's converters write them."""

import json
import re

import gguf
import torch
from safetensors.torch import load_file

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(.*)")


def add_sizes(writer, config, head_dim):
    """Write the keys that every architecture has."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, add in (
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("layer_norm_eps", writer.add_layer_norm_eps),
        ("norm_epsilon", writer.add_layer_norm_eps),
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("num_experts", writer.add_expert_count),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
    ):
        if config.get(key):
            add(config[key])


def add_tokenizer(writer, model_dir):
    """Write the byte-level tokenizer of a directory."""
    stored = json.loads((model_dir / "tokenizer.json").read_text())
    vocab = sorted(stored["model"]["vocab"].items(), key=lambda item: item[1])
    special = {each["content"] for each in stored["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
    writer.add_eos_token_id(2)


def ggml_tensors(directory, architecture, config, norm_offset):
    """Return the tensors of a directory by their names in GGUF."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stacks, found = {}, {}
    for name, weight in load_file(directory / "model.safetensors").items():
        if match := EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = weight
        else:
            found[name] = weight
    for name, experts in stacks.items():
        found[name] = torch.stack([experts[index] for index in sorted(experts)])
    return {
        names.get_name(name, try_suffixes=(".weight", ".bias")): _stored(
            name, weight, architecture, config, norm_offset
        )
        for name, weight in found.items()
    }


def _stored(name, weight, architecture, config, norm_offset):
    if name.endswith("norm.weight"):
        weight = weight + norm_offset
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if architecture == "llama" and part in name:
            count, rows = config[key], weight.shape[0]
            weight = weight.view(count, 2, rows // count // 2, -1).transpose(1, 2)
            weight = weight.reshape(rows, -1)
    return weight.contiguous().numpy()


def write_family(
    directory,
    path,
    architecture,
    add_keys,
    *,
    tensors=(),
    leave_out=(),
    norm_offset=0.0,
    last_keys=None,
):
    """Write the model in `directory` to `path`.

    add_keys: called with the writer, to add the keys of rope; last_keys: the same after all others,
    which it may replace. tensors: further ones by name. leave_out: names of tensors.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    add_sizes(writer, config, config.get("head_dim", 16))
    add_keys(writer)
    add_tokenizer(writer, directory)
    if last_keys is not None:
        last_keys(writer)
    found = ggml_tensors(directory, architecture, config, norm_offset)
    for name, values in {**found, **dict(tensors)}.items():
        if name not in leave_out:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
