"""Sizes of recurrent layers: short convolutions, the gated delta rule, and state spaces.

Such a layer has no keys and values. It maps its *inputs*, a vector of each token, to outputs by a
state of the sequence: the last inputs, which a causal convolution reads, and a *memory*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from specdec.config.engine import DTYPE_BYTES, DTypeName
from specdec.models.config.traits import BesideAttention, DecoderTraits
from specdec.types.errors import InvalidValueError
from specdec.types.sharding import partition

_MEMORY_BYTES = 4
"""Size of one element of a recurrent state, which is float32 in every model."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateShape:
    """State of one recurrent layer of a sequence on a rank.

    window: earlier inputs that its convolution reads. num_inputs: numbers of a token's input.
    memory: shape of the memory; (0,) without one. num_hidden: of the hidden state of a guess, which
    is kept in place of its input; None where that is the input.
    """

    window: int
    num_inputs: int
    memory: Shape
    num_hidden: int | None = None

    def num_bytes(self, dtype: DTypeName, num_guesses: int) -> int:
        """Return the bytes of the state, and of the inputs of guesses that are not verified."""
        of_guess = self.num_inputs if self.num_hidden is None else self.num_hidden
        inputs = self.window * self.num_inputs + num_guesses * of_guess
        return inputs * DTYPE_BYTES[dtype] + prod(self.memory) * _MEMORY_BYTES


@dataclass(frozen=True)
class ShortConvolution:
    """Gated causal convolution of each channel over a few tokens (LFM2, arXiv 2511.23404).

    has_bias: of its projections and of the convolution.
    """

    num_channels: int
    kernel_size: int
    has_bias: bool
    prefix: str = "conv"

    @property
    def num_units(self) -> int:
        """Units that ranks divide: the channels."""
        return self.num_channels

    def state(self, own: range) -> StateShape:
        """Return the state of a rank that has `own` channels."""
        return StateShape(self.kernel_size - 1, len(own), (0,))

    def tensors(self, hidden_size: int) -> Iterator[tuple[str, Shape]]:
        """Yield the tensors of a layer, after its prefix."""
        channels = self.num_channels
        sizes: dict[str, Shape] = {
            "in_proj": (3 * channels, hidden_size),
            "conv": (channels, 1, self.kernel_size),
            "out_proj": (hidden_size, channels),
        }
        for name, shape in sizes.items():
            yield f"{name}.weight", shape
            if self.has_bias:
                yield f"{name}.bias", shape[:1]

    def num_matrix_weights(self, hidden_size: int, num_units: int) -> int:
        """Return the weights of the linear layers of `num_units` units."""
        return 4 * num_units * hidden_size


@dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet (arXiv 2412.06464): each key head serves as many value heads as the others.

    is_grouped: whether the projections of a key head and its value heads follow each other in one
    tensor (Qwen3-Next); else those of all heads do. is_separate: whether each projection is a
    tensor (OLMo Hybrid). share_scale: factor of the share that a token replaces.
    norm_eps: of outputs; None for that of the model.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    is_grouped: bool
    is_separate: bool = False
    share_scale: float = 1.0
    norm_eps: float | None = None
    prefix: str = "linear_attn"

    @property
    def output_names(self) -> tuple[str, str]:
        """Names of the norm and of the projection of outputs."""
        return ("o_norm", "o_proj") if self.is_separate else ("norm", "out_proj")

    @property
    def projections(self) -> dict[str, int]:
        """Rows that a key head has of each projection of the input, by its name."""
        keys, outputs, values = self.key_dim, self.unit_outputs, self.values_per_key
        if self.is_separate:
            names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
            sizes = (keys, keys, outputs, outputs, values, values)
            return dict(zip(names, sizes, strict=True))
        if self.is_grouped:
            whole = self.unit_channels + outputs
            return {"in_proj_qkvz": whole, "in_proj_ba": 2 * values}
        others = {"in_proj_z": outputs, "in_proj_b": values, "in_proj_a": values}
        return {"in_proj_qkv": self.unit_channels} | others

    @property
    def num_units(self) -> int:
        """Units that ranks divide: the key heads with their value heads."""
        return self.num_key_heads

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def unit_channels(self) -> int:
        """Queries, keys and values of a key head, which the convolution mixes."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    @property
    def unit_outputs(self) -> int:
        """Values of a key head."""
        return self.values_per_key * self.value_dim

    def state(self, own: range) -> StateShape:
        """Return the state of a rank that has `own` key heads."""
        num_inputs = len(own) * (self.unit_channels + 2 * self.values_per_key)
        memory = (len(own) * self.values_per_key, self.key_dim, self.value_dim)
        return StateShape(self.kernel_size - 1, num_inputs, memory)

    def tensors(self, hidden_size: int) -> Iterator[tuple[str, Shape]]:
        """Yield the tensors of a layer, after its prefix."""
        count, (norm, output) = self.num_key_heads, self.output_names
        for name, size in self.projections.items():
            yield f"{name}.weight", (count * size, hidden_size)
        yield "conv1d.weight", (count * self.unit_channels, 1, self.kernel_size)
        yield "dt_bias", (self.num_value_heads,)
        yield "A_log", (self.num_value_heads,)
        yield f"{norm}.weight", (self.value_dim,)
        yield f"{output}.weight", (hidden_size, self.num_value_heads * self.value_dim)

    def num_matrix_weights(self, hidden_size: int, num_units: int) -> int:
        """Return the weights of the linear layers of `num_units` units."""
        of_unit = self.unit_channels + 2 * self.unit_outputs + 2 * self.values_per_key
        return num_units * of_unit * hidden_size


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2 (arXiv 2405.21060): heads in groups, each with one B and C for its heads.

    Each rank has B and C of all groups. has_bias: of the input projection; has_conv_bias: of the
    convolution; has_output_bias: of the output projection. has_norm: whether outputs are normalized
    by group, before their gates if norms_before_gate, else after them. input_scale: factor of the
    layer's input. scales: factors of its gates, values, B, C and steps.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel_size: int
    has_bias: bool
    has_conv_bias: bool
    has_output_bias: bool
    has_norm: bool = True
    norms_before_gate: bool = False
    input_scale: float = 1.0
    scales: tuple[float, float, float, float, float] = (1.0,) * 5
    prefix: str = "mamba"

    @property
    def num_units(self) -> int:
        """Units that ranks divide: the heads."""
        return self.num_heads

    @property
    def group_channels(self) -> int:
        """B or C of all groups."""
        return self.num_groups * self.state_dim

    def state(self, own: range) -> StateShape:
        """Return the state of a rank that has `own` heads."""
        num_inputs = len(own) * (self.head_dim + 1) + 2 * self.group_channels
        return StateShape(
            self.kernel_size - 1, num_inputs, (len(own), self.state_dim, self.head_dim)
        )

    def tensors(self, hidden_size: int) -> Iterator[tuple[str, Shape]]:
        """Yield the tensors of a layer, after its prefix."""
        values = self.num_heads * self.head_dim
        channels = values + 2 * self.group_channels
        sizes: dict[str, Shape] = {
            "in_proj": (values + channels + self.num_heads, hidden_size),
            "conv1d": (channels, 1, self.kernel_size),
            "out_proj": (hidden_size, values),
        }
        biases = {"in_proj": self.has_bias, "conv1d": self.has_conv_bias}
        biases["out_proj"] = self.has_output_bias
        for name, shape in sizes.items():
            yield f"{name}.weight", shape
            if biases[name]:
                yield f"{name}.bias", shape[:1]
        if self.has_norm:
            yield "norm.weight", (values,)
        yield from ((name, (self.num_heads,)) for name in ("A_log", "D", "dt_bias"))

    def num_matrix_weights(self, hidden_size: int, num_units: int) -> int:
        """Return the weights of the linear layers of `num_units` units."""
        return (num_units * (3 * self.head_dim + 1) + 2 * self.group_channels) * hidden_size


@dataclass(frozen=True)
class KimiDelta:
    """Kimi Delta Attention (arXiv 2510.26692): a gated delta rule with a decay for each channel.

    Decays and gates are projected by latents of head_dim, which every rank has.
    """

    num_heads: int
    head_dim: int
    kernel_size: int
    prefix: str = "self_attn"

    @property
    def num_units(self) -> int:
        """Units that ranks divide: the heads."""
        return self.num_heads

    def state(self, own: range) -> StateShape:
        """Return the state of a rank that has `own` heads."""
        num_inputs = len(own) * (4 * self.head_dim + 1)
        return StateShape(
            self.kernel_size - 1, num_inputs, (len(own), self.head_dim, self.head_dim)
        )

    def tensors(self, hidden_size: int) -> Iterator[tuple[str, Shape]]:
        """Yield the tensors of a layer, after its prefix."""
        heads, dim = self.num_heads, self.head_dim
        values = heads * dim
        yield from ((f"{part}_proj.weight", (values, hidden_size)) for part in "qkv")
        for part in "fg":
            yield f"{part}_a_proj.weight", (dim, hidden_size)
            yield f"{part}_b_proj.weight", (values, dim)
        yield "b_proj.weight", (heads, hidden_size)
        yield "conv1d.weight", (3 * values, 1, self.kernel_size)
        yield "A_log", (1, 1, heads, 1)
        yield "dt_bias", (values,)
        yield "o_norm.weight", (dim,)
        yield "o_proj.weight", (hidden_size, values)

    def num_matrix_weights(self, hidden_size: int, num_units: int) -> int:
        """Return the weights of the linear layers of `num_units` units."""
        dim, values = self.head_dim, num_units * self.head_dim
        return (4 * values + num_units + 2 * dim) * hidden_size + 2 * values * dim


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba (arXiv 2312.00752): a state of state_dim for each channel, each with its own decay.

    The convolved values of all ranks are projected to B, C and to latents of step_rank, of which
    steps of own channels follow; all three are normalized (Jamba). has_bias: of the projections of
    inputs and outputs; has_conv_bias: of the convolution. keeps_hidden: of guesses; see `state`.
    """

    hidden_size: int
    num_channels: int
    state_dim: int
    step_rank: int
    kernel_size: int
    has_bias: bool
    has_conv_bias: bool
    prefix: str = "mamba"
    keeps_hidden: bool = True

    @property
    def num_units(self) -> int:
        """Units that ranks divide: the channels."""
        return self.num_channels

    @property
    def num_parameters(self) -> int:
        """Parameters that follow from the values of a token: latents of steps, B and C."""
        return self.step_rank + 2 * self.state_dim

    def state(self, own: range) -> StateShape:
        """Return that of `own` channels; guesses are kept by hidden states where these are less."""
        hidden = self.hidden_size if self.keeps_hidden else len(own)
        num_hidden = hidden if hidden < len(own) else None
        return StateShape(self.kernel_size - 1, len(own), (len(own), self.state_dim, 1), num_hidden)

    def tensors(self, hidden_size: int) -> Iterator[tuple[str, Shape]]:
        """Yield the tensors of a layer, after its prefix."""
        channels = self.num_channels
        sizes: dict[str, tuple[Shape, bool]] = {
            "in_proj": ((2 * channels, hidden_size), self.has_bias),
            "conv1d": ((channels, 1, self.kernel_size), self.has_conv_bias),
            "x_proj": ((self.num_parameters, channels), False),
            "dt_proj": ((channels, self.step_rank), True),
            "out_proj": ((hidden_size, channels), self.has_bias),
        }
        for name, (shape, has_bias) in sizes.items():
            yield f"{name}.weight", shape
            if has_bias:
                yield f"{name}.bias", shape[:1]
        yield "dt_layernorm.weight", (self.step_rank,)
        yield from ((f"{name}_layernorm.weight", (self.state_dim,)) for name in "bc")
        yield "A_log", (channels, self.state_dim)
        yield "D", (channels,)

    def num_matrix_weights(self, hidden_size: int, num_units: int) -> int:
        """Return the weights of the linear layers of `num_units` units."""
        return num_units * (3 * hidden_size + self.num_parameters + self.step_rank)


RecurrentKind = ShortConvolution | GatedDelta | StateSpace | KimiDelta | SelectiveScan


@dataclass(frozen=True)
class Recurrent:
    """The layers of a decoder that have a recurrence in place of attention.

    beside: factors where they have attention too; None where they have none. mlps: the layers that
    are an MLP or a mixture alone, where the others have none; None where each layer has one.
    traits: of the recurrent layers; None where they are those of the others.
    """

    layers: frozenset[int]
    kind: RecurrentKind
    beside: BesideAttention | None = None
    mlps: frozenset[int] | None = None
    traits: DecoderTraits | None = None

    @property
    def without_attention(self) -> frozenset[int]:
        """Layers without attention, and so without KV."""
        return (self.layers if self.beside is None else frozenset()) | (self.mlps or frozenset())

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP or a mixture."""
        return self.mlps is None or layer in self.mlps

    def units(self, rank: int, tensor_parallel_size: int) -> range:
        """Return the units of a rank. Raises InvalidValueError for more ranks than units."""
        count = self.kind.num_units
        if tensor_parallel_size > count:
            limit = f"at most {count}, the units of a recurrent layer"
            raise InvalidValueError("tensor_parallel_size", tensor_parallel_size, limit)
        return partition(count, tensor_parallel_size)[rank]

    def state_bytes(
        self, dtype: DTypeName, tensor_parallel_size: int = 1, num_guesses: int = 0
    ) -> int:
        """Return the bytes of a sequence's states in all layers, on all ranks together.

        num_guesses: most guesses of a row, whose inputs are kept until they are verified.
        """
        size = tensor_parallel_size
        ranks = (self.rank_bytes(dtype, rank, size) for rank in range(size))
        return sum(state + num_guesses * guess for state, guess in ranks)

    def rank_bytes(self, dtype: DTypeName, rank: int, tensor_parallel_size: int) -> tuple[int, int]:
        """Return the bytes of a sequence's states on a rank, and of each guess beside them."""
        state = self.kind.state(self.units(rank, tensor_parallel_size))
        without, with_one = (len(self.layers) * state.num_bytes(dtype, count) for count in (0, 1))
        return without, with_one - without

    def num_matrix_weights(self, hidden_size: int) -> int:
        """Return the weights of the linear layers of all recurrent layers."""
        return self.num_rank_weights(hidden_size, 0, 1)

    def num_rank_weights(self, hidden_size: int, rank: int, tensor_parallel_size: int) -> int:
        """Return those of a rank."""
        own = self.units(rank, tensor_parallel_size)
        return len(self.layers) * self.kind.num_matrix_weights(hidden_size, len(own))

    def num_vector_weights(self, hidden_size: int) -> int:
        """Return the weights of all recurrent layers that are not of linear layers."""
        of_layer = sum(prod(shape) for _, shape in self.kind.tensors(hidden_size))
        return len(self.layers) * of_layer - self.num_matrix_weights(hidden_size)
