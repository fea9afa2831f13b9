"""Sizes of a decoder whose layers differ in the shape of attention, and read each other's KV."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from specdec.config.json_values import unsupported
from specdec.models.config.traits import Experts
from specdec.types.sharding import HeadShard

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AttentionShape:
    """Attention of a layer. has_values: whether it projects to values; else they are its keys."""

    num_kv_heads: int
    head_dim: int
    has_values: bool = True


@dataclass(frozen=True)
class VariedLayers:
    """How the layers of a decoder differ from each other (Gemma 4).

    shapes: of the attention of each layer. kv_layers: the layer whose keys and values each one
    reads: itself, or an earlier one of its shape. mlp_sizes: hidden units of each layer's MLP.
    input_size: of the vector that each layer reads of every token beside the residual stream; 0
    without. num_inputs: tokens in the table of these vectors.
    """

    shapes: tuple[AttentionShape, ...]
    kv_layers: tuple[int, ...]
    mlp_sizes: tuple[int, ...]
    input_size: int
    num_inputs: int

    def __post_init__(self) -> None:
        for shape, source in zip(self.shapes, self.kv_layers, strict=True):
            if shape != self.shapes[source]:
                limit = f"the same for layers that share keys and values, as layer {source}"
                raise unsupported("per_layer_config", shape, limit)

    @cached_property
    def kv_places(self) -> dict[int, int]:
        """The place in the KV cache of each layer with separate keys and values."""
        own = (index for index, source in enumerate(self.kv_layers) if index == source)
        return {index: place for place, index in enumerate(own)}

    def shard(self, index: int, num_heads: int, rank: int, size: int) -> HeadShard:
        """Return the heads of a layer on a rank of `size`."""
        return HeadShard.all_ranks(num_heads, self.shapes[index].num_kv_heads, size)[rank]

    def kv_width(self, num_heads: int, rank: int, size: int) -> int:
        """Return the numbers of a token's keys in a layer of a rank's cache: the most of any."""
        return max(
            len(self.shard(index, num_heads, rank, size).kv) * self.shapes[index].head_dim
            for index in self.kv_places
        )

    def num_weights(
        self, hidden: int, num_heads: int, experts: Experts | None, *, has_bias: bool
    ) -> int:
        """Return the weights of all layers, and of what they share."""
        num_experts = 0 if experts is None else experts.count
        found = sum(map(prod, self.model_tensors(hidden).values()))
        found += 3 * hidden * sum(self.mlp_sizes)
        if experts is not None:
            of_layer = experts.num_vector_weights(hidden, 2) + 3 * hidden * experts.num_units
            found += len(self.shapes) * of_layer
        for index in range(len(self.shapes)):
            tensors = self.layer_tensors(index, hidden, num_heads, num_experts, has_bias=has_bias)
            found += sum(map(prod, tensors.values()))
        return found

    def num_copied(self, hidden: int, num_heads: int, size: int) -> int:
        """Return the weights that several of `size` ranks have, without the first of each."""
        of_inputs = 3 * len(self.shapes) * self.input_size * hidden
        copied = (size - 1) * of_inputs
        for index in self.kv_places:
            shape = self.shapes[index]
            ranks = (self.shard(index, num_heads, rank, size).kv for rank in range(size))
            num_more = sum(map(len, ranks)) - shape.num_kv_heads
            copied += num_more * shape.head_dim * hidden * (1 + shape.has_values)
        return copied

    def model_tensors(self, hidden: int) -> dict[str, Shape]:
        """Return the tensors of a decoder beside those of its layers and of the embedding."""
        if not self.input_size:
            return {}
        width = len(self.shapes) * self.input_size
        return {
            "model.embed_tokens_per_layer.weight": (self.num_inputs, width),
            "model.per_layer_model_projection.weight": (width, hidden),
            "model.per_layer_projection_norm.weight": (self.input_size,),
        }

    def layer_tensors(
        self, index: int, hidden: int, num_heads: int, num_experts: int, *, has_bias: bool
    ) -> dict[str, Shape]:
        """Return the tensors of a layer, without those of its MLP and of its experts."""
        shape = self.shapes[index]
        dim, outputs = shape.head_dim, {"q_proj": num_heads * shape.head_dim}
        norms = ["q_norm"]
        if index in self.kv_places:
            kv = shape.num_kv_heads * dim
            outputs |= {"k_proj": kv, **({"v_proj": kv} if shape.has_values else {})}
            norms.append("k_norm")
        found: dict[str, Shape] = {f"self_attn.{name}.weight": (dim,) for name in norms}
        found |= {f"self_attn.{name}.weight": (rows, hidden) for name, rows in outputs.items()}
        found["self_attn.o_proj.weight"] = (hidden, num_heads * dim)
        if has_bias:
            biases = {**outputs, "o_proj": hidden}
            found |= {f"self_attn.{name}.bias": (rows,) for name, rows in biases.items()}
        names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        layer_norms = [f"{name}_layernorm" for name in names]
        if num_experts:
            layer_norms += [f"post_feedforward_layernorm_{part}" for part in (1, 2)]
            layer_norms.append("pre_feedforward_layernorm_2")
            found |= {"router.scale": (hidden,), "router.per_expert_scale": (num_experts,)}
        if self.input_size:
            layer_norms.append("post_per_layer_input_norm")
            found["per_layer_input_gate.weight"] = (self.input_size, hidden)
            found["per_layer_projection.weight"] = (hidden, self.input_size)
        found |= {f"{name}.weight": (hidden,) for name in layer_norms}
        return found | {"layer_scalar": (1,)}
