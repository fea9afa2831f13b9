"""The tensors of a decoder's checkpoint, by name and shape, as its layers read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specdec.models.config.attention.latent import INDEXER, Indexer, Latent
from specdec.models.config.attention.varied_layers import VariedLayers
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.traits import (
    XIELU_PREFIX,
    Activation,
    DecoderTraits,
    Experts,
    NormKind,
    QkNorm,
)
from specdec.models.weights.tensor_headers import HeaderSource

Shape = tuple[int, ...]
_Tensors = Iterator[tuple[str, Shape]]
_HEAD = "lm_head.weight"


def in_context(config: ModelConfig, max_model_len: int) -> ModelConfig:
    """Return a model without the layers that its longest context does not need: indexers."""
    if config.latent is None:
        return config
    return replace(config, latent=config.latent.in_context(max_model_len))


def embedding_name(config: ModelConfig, stored: HeaderSource) -> str:
    """Return the name that a checkpoint has for the embedding.

    It is the head's where config.json ties both and the files have that one alone, as in those of
    safetensors' `save_model`, which keeps the first name of a shared tensor.
    """
    name = "model.embed_tokens.weight"
    has_head_alone = name not in stored and _HEAD in stored
    return _HEAD if config.tie_word_embeddings and has_head_alone else name


def decoder_tensors(config: ModelConfig, stored: HeaderSource) -> dict[str, Shape]:
    """Return the shape of each tensor that the ranks of a model read together.

    stored: as in `embedding_name`.
    """
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {embedding_name(config, stored): table}
    if not config.tie_word_embeddings:
        shapes[_HEAD] = table
    shapes |= dict(_norm(config, config.traits.names.final_norm, config.hidden_size))
    if config.varied is not None:
        shapes |= config.varied.model_tensors(config.hidden_size)
    for index in range(config.num_layers):
        shapes |= {
            f"model.layers.{index}.{name}": shape
            for name, shape in layer_tensors(config, index).items()
        }
    return shapes


def linear_layers(config: ModelConfig) -> dict[str, Shape]:
    """Return [out_features, in_features] of the linear layers that adapters may update, by name.

    Those of a mixture of experts and of an indexer are left out.
    """
    experts, shapes = config.experts, dict[str, Shape]()
    mixture = dict[str, Shape]() if experts is None else dict(_layer_mixture(config, experts))
    for index in range(config.num_layers):
        own = mixture if experts is not None and index in experts.layers else ()
        for name, shape in layer_tensors(config, index).items():
            module, _, kind = name.rpartition(".")
            is_exact = name in own or "norm" in module or f".{INDEXER}." in module
            if kind == "weight" and len(shape) == 2 and not is_exact:
                shapes[f"model.layers.{index}.{module}"] = shape
    return shapes


def layer_tensors(
    config: ModelConfig, index: int, input_size: int | None = None
) -> dict[str, Shape]:
    """Return the tensors of a layer. input_size: of attention, if not `hidden_size`."""
    if config.varied is not None:
        return _varied_tensors(config, config.varied, index)
    hidden, recurrent = config.hidden_size, config.recurrent
    shapes: dict[str, Shape] = {}
    for name in _norm_names(layer_traits(config, index)):
        shapes |= dict(_norm(config, name, hidden))
    shapes |= dict(_mixers(config, index, input_size or hidden))
    if recurrent is not None and not recurrent.has_mlp(index):
        return shapes
    experts, mlp = config.experts, config.traits.names.mlp
    if experts is None or index not in experts.layers:
        has_bias = config.has_mlp_bias
        return shapes | dict(_mlp(config, mlp, config.intermediate_size, has_bias=has_bias))
    return shapes | dict(_layer_mixture(config, experts))


def _varied_tensors(config: ModelConfig, varied: VariedLayers, index: int) -> dict[str, Shape]:
    hidden, experts, names = config.hidden_size, config.experts, config.traits.names
    count, has_bias = 0 if experts is None else experts.count, config.has_qkv_bias
    shapes = varied.layer_tensors(index, hidden, config.num_heads, count, has_bias=has_bias)
    shapes |= dict(_mlp(config, names.mlp, varied.mlp_sizes[index], has_bias=False))
    return shapes if experts is None else shapes | dict(_layer_mixture(config, experts))


def layer_traits(config: ModelConfig, index: int) -> DecoderTraits:
    """Return the traits of a layer."""
    recurrent = config.recurrent
    own = recurrent.traits if recurrent and index in recurrent.layers else None
    return own or config.traits


def _norm_names(traits: DecoderTraits) -> list[str]:
    """Return the names of the norms of hidden states in a layer."""
    has_mlp_norm = traits.has_input_norms and not (traits.is_parallel or traits.has_one_block)
    names = [traits.names.input_norm] * traits.has_input_norms
    names += [traits.names.mlp_norm] * has_mlp_norm
    if traits.has_output_norms:
        names += [traits.names.attention_output_norm, traits.names.mlp_output_norm]
    return names


def _mixers(config: ModelConfig, index: int, input_size: int) -> _Tensors:
    """Yield the tensors of a layer's attention, and of its recurrence."""
    recurrent, prefix = config.recurrent, config.traits.names.attention
    if recurrent is not None and index in recurrent.layers:
        kind = recurrent.kind
        for name, shape in kind.tensors(config.hidden_size):
            yield f"{kind.prefix}.{name}", shape
    if recurrent is None or index not in recurrent.without_attention:
        latent = config.latent
        tensors = _latents(config, latent, index) if latent else _heads(config, input_size)
        yield from ((f"{prefix}.{name}", shape) for name, shape in tensors)


def _norm(config: ModelConfig, name: str, size: int) -> _Tensors:
    yield f"{name}.weight", (size,)
    if config.traits.norm is NormKind.LAYER and config.traits.has_norm_bias:
        yield f"{name}.bias", (size,)


def _linear(name: str, out: int, inner: int, *, has_bias: bool = False) -> _Tensors:
    yield f"{name}.weight", (out, inner)
    if has_bias:
        yield f"{name}.bias", (out,)


def _linears(names: tuple[str, ...], sizes: list[int], inner: int, *, has_bias: bool) -> _Tensors:
    """Yield projections of one input; a single name has the rows of all."""
    whole = sizes if len(names) == len(sizes) else [sum(sizes)]
    for name, size in zip(names, whole, strict=True):
        yield from _linear(name, size, inner, has_bias=has_bias)


def _heads(config: ModelConfig, input_size: int) -> _Tensors:
    traits, dim = config.traits, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    has_bias = config.has_qkv_bias
    if traits.names.attention_gate is not None:
        yield from _linear(traits.names.attention_gate, query, input_size)
    sizes = [query * (1 + traits.has_gates_beside_queries), kv, kv]
    yield from _linears(traits.names.qkv, sizes, input_size, has_bias=has_bias)
    output = traits.names.attention_output
    yield from _linear(output, config.hidden_size, query, has_bias=config.has_output_bias)
    if traits.has_sinks:
        yield "sinks", (config.num_heads,)
    if not config.has_qk_norm:
        return
    counts = (config.num_heads, config.num_kv_heads)
    for name, heads in zip(traits.names.qk_norms, counts, strict=True):
        match traits.qk_norm:
            case QkNorm.HEAD:
                yield from _norm(config, name, dim)
            case QkNorm.EACH_HEAD:
                yield f"{name}.weight", (heads, dim)
            case QkNorm.ALL_HEADS:
                yield f"{name}.weight", (heads * dim,)


def _latents(config: ModelConfig, latent: Latent, index: int) -> _Tensors:
    hidden, queries = config.hidden_size, config.num_heads * latent.query_dim
    if latent.query_rank is None:
        yield from _linear("q_proj", queries, hidden)
    else:
        yield from _linear("q_a_proj", latent.query_rank, hidden)
        yield "q_a_layernorm.weight", (latent.query_rank,)
        yield from _linear("q_b_proj", queries, latent.query_rank)
    yield from _linear("kv_a_proj_with_mqa", latent.key_dim, hidden)
    yield "kv_a_layernorm.weight", (latent.rank,)
    expanded = config.num_heads * (latent.plain_dim + latent.value_dim)
    yield from _linear("kv_b_proj", expanded, latent.rank)
    yield from _linear("o_proj", hidden, config.num_heads * latent.value_dim)
    if latent.indexer is not None and index in latent.indexer.layers:
        yield from _indexer(latent.indexer, hidden, latent.query_rank or 0)


def _indexer(indexer: Indexer, hidden: int, query_rank: int) -> _Tensors:
    queries = indexer.num_heads * indexer.head_dim
    yield from _linear(f"{INDEXER}.wq_b", queries, query_rank)
    yield from _linear(f"{INDEXER}.wk", indexer.head_dim, hidden)
    yield from _linear(f"{INDEXER}.weights_proj", indexer.num_heads, hidden)
    yield f"{INDEXER}.k_norm.weight", (indexer.head_dim,)
    yield f"{INDEXER}.k_norm.bias", (indexer.head_dim,)


def _mlp(
    config: ModelConfig, prefix: str, inner: int, *, has_bias: bool, is_routed: bool = False
) -> _Tensors:
    gate_up, down = config.traits.names.of_mlp(is_routed=is_routed)
    names = tuple(f"{prefix}.{name}" for name in gate_up)
    sizes = [inner] * (1 + config.traits.has_gate)
    latent = config.experts.latent_size if config.experts and is_routed else None
    size = latent or config.hidden_size
    yield from _linears(names, sizes, size, has_bias=has_bias)
    yield from _linear(f"{prefix}.{down}", size, inner, has_bias=has_bias)
    if config.traits.activation is Activation.XIELU:
        shapes: dict[str, Shape] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        yield from ((f"{prefix}.{XIELU_PREFIX}.{name}", shape) for name, shape in shapes.items())


def _layer_mixture(config: ModelConfig, experts: Experts) -> _Tensors:
    """Yield the tensors of a layer's mixture."""
    prefix = "" if config.varied is not None else config.traits.names.mixture_prefix("")
    tensors = _mixture(config, experts, prefix)
    yield from ((name.removeprefix("."), shape) for name, shape in tensors)


def _mixture(config: ModelConfig, experts: Experts, prefix: str) -> _Tensors:
    names, has_bias, hidden = config.traits.names, experts.has_bias, config.hidden_size
    if experts.routing is not None and experts.routing.has_bias:
        row = (1,) if experts.routing.is_bias_a_row else ()
        yield f"{prefix}.{names.choice_bias}", (*row, experts.count)
    router = f"{prefix}.{names.router}"
    yield from _linear(router, experts.count, hidden, has_bias=has_bias)
    if (size := experts.latent_size) is not None:
        yield from _linear(f"{prefix}.{names.to_latents}", size, hidden)
        yield from _linear(f"{prefix}.{names.from_latents}", hidden, size)
    for index in range(experts.count):
        expert, size = f"{prefix}.{names.experts}.{index}", experts.intermediate_size
        yield from _mlp(config, expert, size, has_bias=has_bias, is_routed=True)
    if experts.shared_size:
        shared = f"{prefix}.{names.shared}"
        yield from _mlp(config, shared, experts.shared_size, has_bias=has_bias)
    if experts.has_shared_gate:
        yield from _linear(f"{prefix}.{names.shared_gate}", 1, hidden)
