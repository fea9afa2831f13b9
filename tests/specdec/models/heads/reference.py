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
    rotated: int | None = None  # dimensions of a head; None: all


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
    cut = sizes.rotated or sizes.head_dim
    query, key = (
        torch.cat([rope(each[..., :cut], positions, sizes.theta), each[..., cut:]], dim=-1)
        for each in (query, key)
    )
    attended = attend(query, key, value, causal(len(x), sizes.window))
    return linear(attended, weights, f"{prefix}.o_proj")


def mlp(x, weights, prefix):
    gate, up = linear(x, weights, f"{prefix}.gate_proj"), linear(x, weights, f"{prefix}.up_proj")
    return linear(F.silu(gate) * up, weights, f"{prefix}.down_proj")


@dataclass(frozen=True)
class Latents:
    """Sizes of the latent attention of a reference."""

    heads: int
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    theta: float = 10_000.0


def rope_of_neighbours(x, theta):
    """Rotate x [T, heads, d], whose pairs are neighbours."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., ::2], x[..., 1::2]
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.stack(rotated, dim=-1).flatten(-2)


def latent_attention(x, weights, prefix, sizes):
    """Attend with keys and values of each head (arXiv 2405.04434, equations 37 to 47)."""
    plain, count = sizes.plain_dim, len(x)
    query = linear(x, weights, f"{prefix}.q_proj") if f"{prefix}.q_proj.weight" in weights else None
    if query is None:
        latent = linear(x, weights, f"{prefix}.q_a_proj")
        latent = rms(latent, weights[f"{prefix}.q_a_layernorm.weight"], 1e-6)
        query = linear(latent, weights, f"{prefix}.q_b_proj")
    query = query.view(count, sizes.heads, -1)
    latent, shared = linear(x, weights, f"{prefix}.kv_a_proj_with_mqa").split(
        (sizes.rank, sizes.rope_dim), dim=1
    )
    latent = rms(latent, weights[f"{prefix}.kv_a_layernorm.weight"], 1e-6)
    expanded = linear(latent, weights, f"{prefix}.kv_b_proj").view(count, sizes.heads, -1)
    rotated = rope_of_neighbours(shared[:, None], sizes.theta).expand(-1, sizes.heads, -1)
    key = torch.cat([expanded[..., :plain], rotated], dim=-1)
    query_rope = rope_of_neighbours(query[..., plain:], sizes.theta)
    query = torch.cat([query[..., :plain], query_rope], dim=-1)
    attended = attend(query, key, expanded[..., plain:], causal(count, None))
    return linear(attended, weights, f"{prefix}.o_proj")


@dataclass(frozen=True)
class Mixture:
    """The choice of experts of a reference. groups, chosen_groups: with sigmoids only."""

    experts: int
    per_token: int
    is_sigmoid: bool = True
    normalizes: bool = True
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    def route(self, logits, bias):
        """Return experts and weights of one token; logits: [experts]."""
        scores = logits.sigmoid() if self.is_sigmoid else logits.softmax(0)
        choice = (scores + bias).view(self.groups, -1)
        if self.groups > 1:
            best = choice.topk(2).values.sum(1).topk(self.chosen_groups).indices
            kept = torch.full_like(choice, -torch.inf)
            kept[best] = choice[best]
            choice = kept
        chosen = choice.flatten().topk(self.per_token).indices
        weights = scores[chosen]
        return chosen, self.scale * (weights / weights.sum() if self.normalizes else weights)


def mixture(x, weights, prefix, sizes):
    """Return the results of each token's experts (arXiv 2412.19437, equations 12 to 16)."""
    bias = weights.get(f"{prefix}.gate.e_score_correction_bias", torch.zeros(sizes.experts))
    rows = []
    for row, logits in zip(x, linear(x, weights, f"{prefix}.gate"), strict=True):
        of_experts = zip(*sizes.route(logits, bias), strict=True)
        rows.append(sum(mlp(row, weights, f"{prefix}.experts.{i}") * w for i, w in of_experts))
    mixed = torch.stack(rows)
    has_shared = f"{prefix}.shared_experts.up_proj.weight" in weights
    return mixed + mlp(x, weights, f"{prefix}.shared_experts") if has_shared else mixed


def layer(x, weights, prefix, sizes):
    """Return the output of a decoder layer; without an input norm if it has no weight."""
    norm = weights.get(f"{prefix}.input_layernorm.weight")
    normed = x if norm is None else rms(x, norm)
    return after_attention(
        x + attention(normed, weights, f"{prefix}.self_attn", sizes), weights, prefix
    )


def after_attention(x, weights, prefix):
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
