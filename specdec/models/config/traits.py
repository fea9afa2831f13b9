"""How the layers of a family differ from Llama's, as data; the defaults are Llama's.

`models.config.registry` has the traits of each architecture. The torch decoder and the native
kernels both implement all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from specdec.config.json_values import unsupported
from specdec.types.sharding import partition


class NormKind(StrEnum):
    """The normalization of hidden states: RMSNorm, or LayerNorm, which subtracts the mean."""

    RMS = "RMSNorm"
    LAYER = "LayerNorm"


class Activation(StrEnum):
    """The activation function of an MLP; GELU in its tanh approximation.

    CLAMPED_SWIGLU: (u + 1) g sigmoid(1.702 g), of a gate g up to 7 and an up projection u from -7
    to 7 (GPT-OSS). RELU2: max(x, 0)^2. XIELU: with trained numbers in each layer (arXiv
    2411.13010).
    """

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
    RELU2 = "relu2"
    XIELU = "xielu"


XIELU_PREFIX = "act_fn"
"""Prefix of the numbers of xIELU in the tensors of an MLP."""


class QkNorm(StrEnum):
    """What the norm of queries and keys covers.

    HEAD: each head, with one vector of weights for all. EACH_HEAD: each head, with separate
    weights. ALL_HEADS: the values of all heads together, on all ranks. ROTATED_HEAD: each head,
    without weights, in the layers with rotary embedding alone.
    """

    HEAD = "by head"
    EACH_HEAD = "by head, own weights"
    ALL_HEADS = "over all heads"
    ROTATED_HEAD = "by rotated head, without weights"


@dataclass(frozen=True)
class TensorNames:
    """Names of a layer's tensors in a checkpoint.

    qkv, gate_up: a single name holds the rows of all its projections, in this order.
    attention_gate: of the projection to gates; None where they are beside queries. attention,
    mlp, mixture: prefixes; of a mixture None for that of the MLP, empty for that of the layer.
    router: of a mixture; choice_bias: of its bias in choices; shared, shared_gate: of its shared
    experts and of their gate; experts: of the others; to_latents, from_latents: of the projections
    of their inputs and results. gate_up and down are also those of each
    expert, unless expert_gate_up and expert_down are given. final_norm: of the decoder, after its
    last layer.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    attention: str = "self_attn"
    attention_gate: str | None = None
    attention_output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    mlp: str = "mlp"
    mixture: str | None = None
    experts: str = "experts"
    expert_gate_up: tuple[str, ...] | None = None
    expert_down: str | None = None
    router: str = "gate"
    to_latents: str = "fc1_latent_proj"
    from_latents: str = "fc2_latent_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    choice_bias: str = "gate.e_score_correction_bias"
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_output_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    final_norm: str = "model.norm"

    def mixture_prefix(self, layer: str) -> str:
        """Return the prefix of a mixture's tensors; layer: that of its layer."""
        name = self.mlp if self.mixture is None else self.mixture
        return f"{layer}.{name}" if name else layer

    def of_mlp(self, *, is_routed: bool) -> tuple[tuple[str, ...], str]:
        """Return the names of gate and up, and of down, of an MLP or of an expert.

        is_routed: whether it is an expert that only some tokens have.
        """
        if not is_routed:
            return self.gate_up, self.down
        return self.expert_gate_up or self.gate_up, self.expert_down or self.down


@dataclass(frozen=True)
class Routing:
    """DeepSeek's choice of the experts of a token (arXiv 2412.19437, section 2.1.2).

    is_sigmoid: whether scores are sigmoids of the router's logits; else their softmax. num_groups:
    of experts; only those of num_chosen_groups are chosen, by the sum of their two best scores
    where adds_two_best, else by the best one. has_bias: whether a bias joins the scores in choices.
    is_bias_a_row: whether it is stored as a matrix of one row. scale: factor of the weights.
    """

    is_sigmoid: bool
    num_groups: int = 1
    num_chosen_groups: int = 1
    has_bias: bool = False
    scale: float = 1.0
    adds_two_best: bool = True
    is_bias_a_row: bool = False


@dataclass(frozen=True)
class ExpertShard:
    """The experts of a mixture on one rank, and the hidden units of each that it has."""

    experts: range
    units: range

    @property
    def num_units(self) -> int:
        """Hidden units of all of them."""
        return len(self.experts) * len(self.units)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP (Shazeer et al. 2017).

    num_per_token: experts that a token is routed to, by the largest probabilities. normalizes:
    whether their probabilities are divided by their sum. intermediate_size: hidden units of each.
    layers: those that have experts. has_bias: of the router and the experts.
    routing: None for the experts with the largest probabilities. shared_size: hidden units of the
    experts that each token has; 0 without any. has_shared_gate: whether their result is multiplied
    by a gate of the token. latent_size: of the inputs and results of routed experts, to which all
    ranks project; None for hidden states. scales_inputs: whether the weights of a token's experts
    multiply what they read, in place of their results. is_divided_by_expert: whether a rank has
    whole experts (GShard, arXiv 2006.16668, section 3), rather than a share of the units of each;
    shared experts are divided by hidden units in any case.
    """

    count: int
    num_per_token: int
    normalizes: bool
    intermediate_size: int
    layers: frozenset[int]
    has_bias: bool = False
    routing: Routing | None = None
    shared_size: int = 0
    has_shared_gate: bool = False
    latent_size: int | None = None
    scales_inputs: bool = False
    is_divided_by_expert: bool = False

    @property
    def num_units(self) -> int:
        """Hidden units of all experts, without shared ones."""
        return self.count * self.intermediate_size

    def num_matrix_weights(
        self, hidden_size: int, num_matrices: int, rank: int, tensor_parallel_size: int
    ) -> int:
        """Return the weights of a rank's matrices in a layer. num_matrices: of an expert."""
        size, units = tensor_parallel_size, self.shard(rank, tensor_parallel_size).num_units
        of_units = units * (self.latent_size or hidden_size)
        of_shared = len(partition(self.shared_size, size)[rank]) * hidden_size
        return num_matrices * (of_units + of_shared) + self.num_latent_weights(hidden_size)

    def num_latent_weights(self, hidden_size: int) -> int:
        """Return the weights of a layer's projections to latents and back, of every rank."""
        return 2 * (self.latent_size or 0) * hidden_size

    def num_vector_weights(self, hidden_size: int, num_inputs: int) -> int:
        """Return the weights of a layer that are not of experts' matrices: of router and biases.

        num_inputs: projections that an expert starts with.
        """
        found = (self.count + self.has_shared_gate) * hidden_size
        if self.has_bias:
            found += self.count * (num_inputs * self.intermediate_size + hidden_size + 1)
        if self.routing is not None:
            found += self.count * self.routing.has_bias
        return found

    def shard(self, rank: int, tensor_parallel_size: int) -> ExpertShard:
        """Return the part of a rank, which may be empty."""
        if self.is_divided_by_expert:
            own = partition(self.count, tensor_parallel_size)[rank]
            return ExpertShard(own, range(self.intermediate_size))
        units = partition(self.intermediate_size, tensor_parallel_size)[rank]
        return ExpertShard(range(self.count), units)


@dataclass(frozen=True)
class BesideAttention:
    """A recurrence beside attention in each layer, which both read one norm (Falcon-H1).

    Factors of the input and output of attention, and of the output of the recurrence.
    """

    attention_input: float
    attention_output: float
    recurrence_output: float


@dataclass(frozen=True)
class LogitTransform:
    """Changes logits l to scale * l, then to softcap * tanh(l / softcap) where there is one."""

    scale: float = 1.0
    softcap: float | None = None

    @property
    def is_identity(self) -> bool:
        """Return whether it leaves logits as they are."""
        return self.scale == 1.0 and self.softcap is None


NO_TRANSFORM = LogitTransform()


@dataclass(frozen=True)
class QueryScale:
    """Factor of a query at position p: 1 + beta ln(1 + floor((p + offset) / length)) (Llama 4).

    is_without_rope: whether only layers without rotary embedding have it.
    """

    beta: float
    length: float
    offset: int = 0
    is_without_rope: bool = False


@dataclass(frozen=True)
class DecoderTraits:
    """The layers of a decoder, where they are not Llama's.

    norm, has_norm_bias: of hidden states; norms of queries and keys have no bias.
    adds_one_to_norms: whether stored weights of norms are one less than their value.
    has_input_norms: whether attention and MLP read normalized hidden states.
    has_output_norms: whether their results are normalized before they join the residual stream.
    is_parallel: whether attention and MLP read the same normalized hidden states.
    has_one_block: whether a layer is attention, a recurrence or an MLP alone, with one norm.
    has_gate: whether the activation is multiplied by an up projection.
    is_rope_interleaved: whether rotary pairs are neighbours in the checkpoint; loading reorders
        them to halves.
    attention_scale: factor of scores; None: 1 / sqrt(head_dim).
    rotates_before_norms: whether queries and keys are rotated before they are normalized.
    query_scale: factor of queries by position; None: 1.
    attention_chunk: size of the chunks of positions, of which a query sees those before it in its
        own, in the layers with rotary embedding; None: all.
    has_attention_gate: whether the result of each query head is multiplied by a gate of each value.
    has_sinks: whether each head has a score that every softmax includes, without a value.
    attention_softcap: bound c of scores s, which become c * tanh(s / c); None: no bound.
    embedding_scale, residual_scale: factors of embeddings, and of the results of attention and MLP.
    rounds_embedding_scale: whether that factor is rounded to the data type of the model.
    gate_scale, mlp_scale: factors of the gate of an MLP before its activation, and of its result.
    """

    norm: NormKind = NormKind.RMS
    has_norm_bias: bool = False
    adds_one_to_norms: bool = False
    has_input_norms: bool = True
    has_output_norms: bool = False
    is_parallel: bool = False
    has_one_block: bool = False
    activation: Activation = Activation.SILU
    has_gate: bool = True
    is_rope_interleaved: bool = False
    qk_norm: QkNorm = QkNorm.HEAD
    rotates_before_norms: bool = False
    attention_scale: float | None = None
    query_scale: QueryScale | None = None
    attention_chunk: int | None = None
    has_attention_gate: bool = False
    has_sinks: bool = False
    attention_softcap: float | None = None
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    residual_scale: float = 1.0
    gate_scale: float = 1.0
    mlp_scale: float = 1.0
    logits: LogitTransform = NO_TRANSFORM
    names: TensorNames = field(default_factory=TensorNames)

    def __post_init__(self) -> None:
        assert not (self.is_parallel and self.changes_outputs), "kernels keep one of both"
        assert self.has_input_norms or not self.is_parallel, "both halves read one norm"
        is_plain = self.has_input_norms and not (self.is_parallel or self.changes_outputs)
        assert is_plain or not self.has_one_block, "a block alone has one norm before it"
        if self.activation is Activation.XIELU and self.has_gate:
            raise unsupported("hidden_act", self.activation.value, "without a gate")

    @property
    def num_layer_norms(self) -> int:
        """Norms of hidden states in a layer."""
        num_inputs = 1 if self.is_parallel or self.has_one_block else 2
        return self.has_input_norms * num_inputs + 2 * self.has_output_norms

    @property
    def has_gates_beside_queries(self) -> bool:
        """Return whether the projection to queries has the gates of attention too."""
        return self.has_attention_gate and self.names.attention_gate is None

    @property
    def num_activation_weights(self) -> int:
        """Numbers of the activation function in a layer."""
        return 4 if self.activation is Activation.XIELU else 0

    @property
    def changes_outputs(self) -> bool:
        """Return whether results of attention and MLP change before they join the residual."""
        return self.has_output_norms or self.residual_scale != 1.0


LLAMA = DecoderTraits()
