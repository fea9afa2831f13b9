"""A layer of Gemma 4: attention of one of several shapes, an MLP, experts, vectors of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels import AttentionPlan, PagedAttention, Rotation
from specdec.kernels.reference.experts import Routes, route
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.attention.varied_layers import VariedLayers
from specdec.models.config.model_config import ModelConfig
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightPart,
)
from specdec.models.layers.mixture import SparseMLP
from specdec.models.layers.mlp import MLP
from specdec.models.layers.norm import RMSNorm
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import head_rows


@dataclass
class LayerPass:
    """Inputs of a layer in one pass, beside the residual stream.

    kv: keys and values of this pass by layer, to which layers add theirs. inputs: the vectors of
    the tokens for this layer, [T, input_size]; None without.
    """

    rotation: Rotation | None
    kv_cache: Tensor  # [num_slots, 2, num_kv_heads, head_dim] of the layer whose KV it reads
    attention: PagedAttention
    plan: AttentionPlan
    kv: dict[int, Tensor]
    inputs: Tensor | None


class VariedAttention(nn.Module):
    """Attention of this rank's heads in a layer of VariedLayers.

    Keys and values are normalized by head, values without weights; a layer without projections to
    them attends to those of an earlier one.
    """

    def __init__(
        self,
        config: ModelConfig,
        varied: VariedLayers,
        index: int,
        reader: CheckpointReader,
        prefix: str,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        shape, hidden = varied.shapes[index], config.hidden_size
        heads = varied.shard(index, config.num_heads, group.rank, group.size)
        self.index, self.source, self.head_dim = index, varied.kv_layers[index], shape.head_dim
        self.num_heads, self.num_kv_heads = len(heads.query), len(heads.kv)
        self.has_values, dim = shape.has_values, shape.head_dim

        def part(name: str, count: int, own: range) -> WeightPart:
            rows = head_rows(own, dim)
            return WeightPart(f"{prefix}.{name}", count * dim, rows, config.has_qkv_bias)

        parts = [part("q_proj", config.num_heads, heads.query)]
        self.query_norm = RMSNorm(reader, f"{prefix}.q_norm.weight", dim, config.rms_norm_eps)
        if self.source == index:
            names = ("k_proj", "v_proj") if shape.has_values else ("k_proj",)
            parts += [part(name, shape.num_kv_heads, heads.kv) for name in names]
            self.key_norm = RMSNorm(reader, f"{prefix}.k_norm.weight", dim, config.rms_norm_eps)
            self.value_norm = RMSNorm(reader, None, dim, config.rms_norm_eps)
        self.qkv_proj = ColumnParallelLinear(reader, hidden, parts)
        self.o_proj = RowParallelLinear(
            reader,
            f"{prefix}.o_proj",
            (hidden, config.num_heads * dim),
            head_rows(heads.query, dim),
            group,
            has_bias=config.has_output_bias,
        )

    def forward(self, x: Tensor, run: LayerPass) -> Tensor:
        """Return [T, hidden_size]; x: the same shape."""
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        query, others = heads.tensor_split((self.num_heads,), 1)
        query = self.query_norm(query).contiguous()
        if run.rotation is not None:
            run.rotation.apply_(query)
        if self.source == self.index:
            run.kv[self.index] = self._keys_and_values(others, run.rotation)
        kv = run.kv[self.source]
        attended = run.attention.run(query, kv, run.kv_cache, run.plan)
        output: Tensor = self.o_proj(attended.flatten(1), None)
        return output

    def _keys_and_values(self, heads: Tensor, rotation: Rotation | None) -> Tensor:
        """Return [T, 2, num_kv_heads, head_dim]; heads: keys, then values if they are projected."""
        key = heads[:, : self.num_kv_heads]
        value = self.value_norm(heads[:, self.num_kv_heads :] if self.has_values else key)
        key = self.key_norm(key).contiguous()
        if rotation is not None:
            rotation.apply_(key)
        return torch.stack((key, value), 1)


class ScaledMixture(SparseMLP):
    """A mixture whose router reads other values than the experts, and has a factor for each one."""

    def __init__(
        self, config: ModelConfig, reader: CheckpointReader, prefix: str, group: TensorParallelGroup
    ) -> None:
        """See SparseMLP; read what tokens are multiplied by for the router, and the factors."""
        super().__init__(config, reader, prefix, group)
        hidden_size, router = config.hidden_size, f"{prefix}.router"
        self.norm = RMSNorm(reader, None, hidden_size, config.rms_norm_eps)
        self.scale = reader.read(f"{router}.scale", (hidden_size,)) * hidden_size**-0.5
        name, shape = f"{router}.per_expert_scale", (self.config.count,)
        self.factors = reader.read(name, shape, dtype=torch.float32)

    def mix(self, x: Tensor, routed: Tensor) -> Tensor:
        """Return the results of the experts for x, which are chosen by `routed`; [T, hidden_size].

        routed: [T, hidden_size].
        """
        routes = route(self.router.in_float32(self.norm(routed) * self.scale), None, self.rule)
        scaled = Routes(routes.weights * self.factors[routes.chosen], routes.chosen)
        return self.group.all_reduce(self._add_one_by_one(x, scaled, torch.zeros_like(x)))


class Gemma4Layer(nn.Module):
    """Attention, MLP and experts, with norms before and after each, and a vector of each token."""

    def __init__(
        self,
        config: ModelConfig,
        varied: VariedLayers,
        index: int,
        reader: CheckpointReader,
        group: TensorParallelGroup,
    ) -> None:
        """Read this rank's weights of a layer."""
        super().__init__()
        prefix, hidden, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps

        def norm(name: str) -> RMSNorm:
            return RMSNorm(reader, f"{prefix}.{name}.weight", hidden, eps)

        self.index = index
        self.attention = VariedAttention(
            config, varied, index, reader, f"{prefix}.self_attn", group
        )
        sized = replace(config, intermediate_size=varied.mlp_sizes[index])
        self.mlp = MLP(sized, reader, f"{prefix}.mlp", group)
        self.attention_norms = norm("input_layernorm"), norm("post_attention_layernorm")
        self.mlp_norms = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        self.mixture: ScaledMixture | None = None
        if config.experts is not None:
            self.mixture = ScaledMixture(config, reader, prefix, group)
            self.expert_norm = norm("pre_feedforward_layernorm_2")
            self.half_norms = [norm(f"post_feedforward_layernorm_{part}") for part in (1, 2)]
        self.gate: ColumnParallelLinear | None = None
        if size := varied.input_size:
            gate = WeightPart(f"{prefix}.per_layer_input_gate", size, range(size))
            self.gate = ColumnParallelLinear(reader, hidden, [gate])
            rows = WeightPart(f"{prefix}.per_layer_projection", hidden, range(hidden))
            self.projection = ColumnParallelLinear(reader, size, [rows])
            self.input_norm = norm("post_per_layer_input_norm")
        self.scale = reader.read(f"{prefix}.layer_scalar", (1,))

    def forward(self, x: Tensor, run: LayerPass) -> Tensor:
        """Return [T, hidden_size]; x: the same shape."""
        before, after = self.attention_norms
        x = x + after(self.attention(before(x), run))
        before, after = self.mlp_norms
        units = self.mlp(before(x), None)
        if self.mixture is not None:
            mixed = self.mixture.mix(self.expert_norm(x), x)
            units = self.half_norms[0](units) + self.half_norms[1](mixed)
        x = x + after(units)
        if self.gate is not None and run.inputs is not None:
            gated = F.gelu(self.gate(x), approximate="tanh") * run.inputs
            x = x + self.input_norm(self.projection(gated))
        return x * self.scale
