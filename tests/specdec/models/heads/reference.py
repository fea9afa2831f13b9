"""Heads written from their papers: whole sequences, no paging, no shared code with the package.

Weights are dictionaries with the names of Hugging Face decoder layers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

EPS = 1e-5


@dataclass(frozen=True)
class Layers:
    """Sizes of the layers of a reference."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    window: int | None = None
    theta: float = 10_000.0


def rms(x, weight, eps=EPS):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x, positions, theta):
    """Rotate x [T, heads, d] by halves."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def linear(x, weights, name):
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def qkv(x, weights, prefix, sizes):
    """Return queries, keys and values [T, heads, head_dim], not rotated."""
    shape = (len(x), -1, sizes.head_dim)
    query, key, value = (linear(x, weights, f"{prefix}.{n}_proj").view(shape) for n in "qkv")
    if f"{prefix}.q_norm.weight" in weights:
        query = rms(query, weights[f"{prefix}.q_norm.weight"])
        key = rms(key, weights[f"{prefix}.k_norm.weight"])
    return query, key, value


def attend(query, key, value, visible):
    """Attend with repeated KV heads; visible: [Tq, Tk] bool."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def causal(count, window):
    rows, cols = torch.arange(count)[:, None], torch.arange(count)[None]
    visible = cols <= rows
    return visible if window is None else visible & (cols > rows - window)


def attention(x, weights, prefix, sizes):
    query, key, value = qkv(x, weights, prefix, sizes)
    positions = torch.arange(len(x)).float()  # the absolute position has no effect
    query, key = rope(query, positions, sizes.theta), rope(key, positions, sizes.theta)
    attended = attend(query, key, value, causal(len(x), sizes.window))
    return linear(attended, weights, f"{prefix}.o_proj")


def mlp(x, weights, prefix):
    gate, up = linear(x, weights, f"{prefix}.gate_proj"), linear(x, weights, f"{prefix}.up_proj")
    return linear(F.silu(gate) * up, weights, f"{prefix}.down_proj")


def layer(x, weights, prefix, sizes):
    """Return the output of a decoder layer; without an input norm if it has no weight."""
    norm = weights.get(f"{prefix}.input_layernorm.weight")
    normed = x if norm is None else rms(x, norm)
    return behind_attention(
        x + attention(normed, weights, f"{prefix}.self_attn", sizes), weights, prefix
    )


def behind_attention(x, weights, prefix):
    normed = rms(x, weights[f"{prefix}.post_attention_layernorm.weight"])
    return x + mlp(normed, weights, f"{prefix}.mlp")


def drafted(part, features, run, to_logits, recycle, count):
    """Return logits [K, V] of a draft by recurrence, every pass over the whole sequence.

    features: [p, H] of the tokens before the last. run: of token ids and features to outputs.
    """
    tokens, logits = list(part.tokens[1:]), []
    for index in range(count):
        output = run(torch.tensor(tokens), features)[-1:]
        logits.append(to_logits(output)[0])
        tokens.append(part.drafts[index])
        features = torch.cat([features, recycle(output)])
    return torch.stack(logits)


def layer_shapes(sizes, hidden, intermediate, index=0, width=None, norms=("input_layernorm",)):
    """Return the shapes of a layer's tensors by name. width: of the input of attention."""
    query, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "self_attn.q_proj": (query, width or hidden),
        "self_attn.k_proj": (kv, width or hidden),
        "self_attn.v_proj": (kv, width or hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        **dict.fromkeys(("post_attention_layernorm", *norms), (hidden,)),
    }
    return {f"layers.{index}.{name}.weight": shape for name, shape in shapes.items()}
