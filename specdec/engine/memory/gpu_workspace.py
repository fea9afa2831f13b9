"""Memory of a GPU beside weights and KV: libraries, activations, logits and graphs.

The sizes are upper estimates by the shapes of the largest step, and not measured on a GPU yet.
"""

from __future__ import annotations

from specdec.config.engine import DTYPE_BYTES, LEAST_UPDATE_PART, MOST_UPDATE_PARTS
from specdec.config.gpu.attention_splits import (
    heads_per_program,
    most_part_rows,
    most_rows,
    num_segments_of,
)
from specdec.config.gpu.graph_sizes import (
    MAX_EXCHANGED_LOGITS,
    MAX_GRAPH_TOKENS,
    MAX_NEW_DRAFT_TOKENS,
    num_graph_sizes,
    num_growth_sizes,
    num_ragged_graphs,
    num_tree_sizes,
)
from specdec.config.gpu.truncation_search import search_bytes
from specdec.config.llm import LLMConfig
from specdec.engine.memory.rank_lookups import lookup_bytes
from specdec.engine.models.model_limits import draft_adapter_limits
from specdec.models.config.model_config import ModelConfig

_MIB, _GIB = 2**20, 2**30
_LIBRARY_BYTES = _GIB
"""The context of CUDA, the code and workspaces of its libraries, and fragmentation."""
_SAMPLING_BYTES = 400 * _MIB
"""Of the rows that are sampled at once, whatever the batch is (`specdec.sampling`)."""
_NCCL_BYTES = 512 * _MIB
"""Buffers of the communicator of several ranks."""
_GRAPHS_BYTES = 6 * _MIB
"""Device memory of the four graphs of one size: the forward pass has a node for each kernel."""
_HEAD_GRAPHS_BYTES = 3 * _MIB
"""Device memory of the further graphs of one size with a draft head, which has few layers."""
_GROWTH_GRAPHS_BYTES = 9 * _MIB
"""Device memory of the three graphs of one number of sequences in which a head drafts trees: some
hundred kernels for each level, by reading."""
_BEST_FIRST_GRAPHS_BYTES = 3 * _MIB
"""Those of trees that grow best first: some ten kernels for each level, by reading."""
_ADAPTED_GRAPHS_BYTES = 2 * _GRAPHS_BYTES
"""Device memory of a pass with adapters as a graph, which has twice as many kernels."""
_PRODUCT_BYTES = 128 * _MIB
"""Parts of a product of few rows in deterministic mode (`kernels.triton.products`)."""
_MOST_TAPS = 6
"""Layers of the target whose states a head reads, and their feature."""


def gpu_workspace_bytes(
    config: LLMConfig, model: ModelConfig, *, drafts: bool, num_engines: int = 1
) -> int:
    """Return the bytes of one rank beside weights and KV.

    drafts: whether it is a rank of a draft model. num_engines: whose steps it runs, one after the
    other, by graphs for the sequences of all. Graphs have their own memory, which the parts of
    contexts take again.
    """
    captures = _captures_graphs(config, drafts=drafts)
    num_sizes = _num_graph_sizes(config, drafts=drafts, num_engines=num_engines) if captures else 0
    num_scored = _scored_tokens(config, drafts=drafts)
    num_captured = min(num_engines * num_scored, MAX_GRAPH_TOKENS) if captures else 0
    return (
        _LIBRARY_BYTES
        + attention_bytes(config, model) * (2 if captures else 1)
        + _activation_bytes(config, model)
        + _logit_bytes(model, num_scored + num_captured)
        + _rank_bytes(config, model, drafts=drafts, captures=captures)
        + (0 if drafts else _count_bytes(config, model))
        + _graph_bytes(config, drafts=drafts) * num_sizes
        + (_growth_bytes(config) if captures and not drafts else 0)
        + _dequantized_bytes(config, model)
        + (_PRODUCT_BYTES * (2 if captures else 1) if config.deterministic and not drafts else 0)
        + (_prompt_bytes(config, model) if captures and not drafts else 0)
        + (0 if drafts else _tap_bytes(config, model) + lookup_bytes(config, model))
    )


def _prompt_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the bytes of the graphs of steps with prompts, which have their own activations."""
    num_graphs = num_ragged_graphs(
        config.max_num_seqs, config.max_num_batched_tokens, model.hidden_size
    )
    of_pass = _GRAPHS_BYTES + (_ADAPTED_GRAPHS_BYTES if config.enable_lora else 0)
    of_pass *= 2 if _num_tree_nodes(config) else 1  # with trees, and without
    return num_graphs * of_pass + _activation_bytes(config, model)


def _dequantized_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the bytes of the largest matrix, which many rows multiply dequantized.

    Of any model: one that is stored in 16 bits may be quantized by loading.
    """
    drafters = (config.draft_model, config.head)
    is_quantized = config.quantization_method or any(
        each and each.quantization for each in drafters
    )
    is_stored = config.keeps_stored_weights and model.stored_weights is not None
    if not (is_stored or is_quantized):
        return 0
    of_attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    outputs = max(2 * model.intermediate_size, of_attention)
    of_matrix = outputs * model.hidden_size * DTYPE_BYTES[config.resolved_dtype]
    return 2 * of_matrix  # graphs have their own memory


def _activation_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the bytes of the activations of a layer, with those of the largest step."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    values = 5 * model.hidden_size + heads + 3 * model.intermediate_size
    if model.experts is not None:  # hidden units and results of each expert of a token
        of_expert = model.experts.intermediate_size + model.hidden_size
        values += model.experts.num_per_token * of_expert
    of_model = config.max_num_batched_tokens * values * DTYPE_BYTES[config.resolved_dtype]
    return of_model + _update_bytes(config, model) + _recurrence_bytes(config, model)


def _recurrence_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the bytes of a recurrence in the largest step, which replays guesses of all rows.

    Inputs are in the type of the model, and float32 once they are mixed; outputs are no more.
    """
    if model.recurrent is None:
        return 0
    speculation, kind = config.speculative_config, model.recurrent.kind
    num_guesses = 0 if speculation is None else speculation.max_row_guesses
    num_mixed = config.max_num_seqs * num_guesses + config.max_num_batched_tokens
    float32_bytes, own_bytes = 4, DTYPE_BYTES[config.resolved_dtype]
    of_input = float32_bytes + 2 * own_bytes
    of_output = float32_bytes
    of_step = num_mixed * of_input + config.max_num_batched_tokens * of_output
    return of_step * kind.state(range(kind.num_units)).num_inputs


def _update_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the bytes of the products of the largest step with A of adapters, in parts.

    The layer of queries, keys and values has most of them (`kernels.triton.lora`), or the expansion
    of latents, whose heads have their own and the rows that they multiply.
    """
    limits = draft_adapter_limits(config, model)
    if limits is None:
        return 0
    float32_bytes, num_projections = 4, 3
    of_token = MOST_UPDATE_PARTS * num_projections * limits.device_rank * float32_bytes
    if model.latent is not None:
        rank = model.latent.rank
        parts = min(MOST_UPDATE_PARTS, max(1, rank // LEAST_UPDATE_PART))
        rows = rank * DTYPE_BYTES[config.resolved_dtype]
        of_heads = model.num_heads * (parts * limits.device_rank * float32_bytes + rows)
        of_token = max(of_token, of_heads)
    return config.max_num_batched_tokens * of_token


def attention_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the most bytes of the parts of contexts that attention splits (`Parts` of Triton's).

    A step has one plan for each window of the layers; a launch splits contexts only if it has few
    programs (`enough_programs`).
    """
    longest = min(
        config.max_model_len or model.max_position_embeddings, model.max_position_embeddings
    )
    num_segments = num_segments_of(-(-longest // config.block_size) * config.block_size)
    if num_segments == 1:
        return 0
    group, value_dim = model.num_heads // model.num_kv_heads, model.head_dim
    if model.latent is not None:
        group, value_dim = heads_per_program(model.num_heads), model.latent.rank
    query_len = 1 + max(_num_draft_tokens(config), _num_tree_nodes(config))
    num_rows = most_part_rows(most_rows(group, value_dim, query_len))
    values_and_statistics, float32_bytes = value_dim + 2, 4
    of_plan = num_rows * num_segments * values_and_statistics * float32_bytes
    return len(set(model.sliding_windows)) * of_plan


def _logit_bytes(model: ModelConfig, num_tokens: int) -> int:
    """Return the bytes of the logits of `num_tokens`, and of sampling.

    These are the tokens of the largest step, and those of the largest graph: graphs have their own
    logits, beside those of steps whose logits are changed or read by operators.
    """
    float32_bytes = 4
    of_token = model.vocab_size * float32_bytes + search_bytes(model.vocab_size)
    return num_tokens * of_token + _SAMPLING_BYTES


def _rank_bytes(config: LLMConfig, model: ModelConfig, *, drafts: bool, captures: bool) -> int:
    """Return the bytes of what several ranks exchange; 0 of one rank.

    Of logits: those that are sent, received, and put together to whole rows.
    """
    draft, size = config.draft_model, config.tensor_parallel_size
    if drafts and draft is not None:
        size = draft.draft_tensor_parallel_size
    if size == 1:
        return 0
    num_logits = _scored_tokens(config, drafts=drafts) * model.vocab_size
    num_copies, float32_bytes = 3 * (2 if captures else 1), 4
    exchanged = min(num_logits, max(MAX_EXCHANGED_LOGITS, size * model.vocab_size))
    return _NCCL_BYTES + num_copies * exchanged * float32_bytes // size


def _count_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the bytes of counts of output tokens, for penalties (`worker.device.seen_tokens`)."""
    int32_bytes = 4
    return config.max_num_seqs * model.vocab_size * int32_bytes


def _graph_bytes(config: LLMConfig, *, drafts: bool) -> int:
    """Return the bytes of the graphs of a size."""
    adapted = _ADAPTED_GRAPHS_BYTES if config.enable_lora else 0
    if config.head is None or drafts:
        return _GRAPHS_BYTES + adapted
    # A draft model runs new tokens and drafted ones, each in a graph.
    of_head = 2 * _GRAPHS_BYTES if config.head.has_layers_of_model else _HEAD_GRAPHS_BYTES
    return _GRAPHS_BYTES + adapted + of_head


def _growth_bytes(config: LLMConfig) -> int:
    """Return the bytes of the graphs in which a head drafts trees; 0 where the host drafts them."""
    speculation = config.speculative_config
    if speculation is None or speculation.head is None:
        return 0
    scored = _scored_tokens(config, drafts=False)
    sizes = num_growth_sizes(config.max_num_seqs, _num_tree_nodes(config), scored)
    if not speculation.head.grows_trees:
        return sizes * _BEST_FIRST_GRAPHS_BYTES * speculation.head.grows_best_first
    levels = speculation.max_chain_tokens if speculation.head.has_layers_of_model else 0
    return sizes * (_GROWTH_GRAPHS_BYTES + 3 * levels * _GRAPHS_BYTES)


def _tap_bytes(config: LLMConfig, model: ModelConfig) -> int:
    """Return the bytes of what a head reads of the largest step on the device."""
    if config.head is None or config.head.has_layers_of_model:
        return 0
    num_tokens = max(_scored_tokens(config, drafts=False), config.max_num_batched_tokens)
    return num_tokens * _MOST_TAPS * model.hidden_size * DTYPE_BYTES[config.resolved_dtype]


def _captures_graphs(config: LLMConfig, *, drafts: bool) -> bool:
    """Return whether ranks of the target, or of the draft model, may capture graphs."""
    draft = config.draft_model
    has_none = drafts and (draft is None or draft.parallel_drafting)
    return not (config.enforce_eager or has_none)


def _num_draft_tokens(config: LLMConfig) -> int:
    speculation = config.speculative_config
    return 0 if speculation is None else speculation.max_chain_tokens


def _num_tree_nodes(config: LLMConfig) -> int:
    speculation = config.speculative_config
    return 0 if speculation is None else speculation.num_draft_tree_tokens


def _num_graph_sizes(config: LLMConfig, *, drafts: bool, num_engines: int) -> int:
    if drafts:
        return num_graph_sizes(num_engines * config.max_num_seqs, MAX_NEW_DRAFT_TOKENS - 1)
    of_chains = num_graph_sizes(config.max_num_seqs, _num_draft_tokens(config))
    return of_chains + num_tree_sizes(config.max_num_seqs, _num_tree_nodes(config))


def _scored_tokens(config: LLMConfig, *, drafts: bool) -> int:
    """Return the last known tokens and drafts of the largest step, padding included.

    The host runs steps of many sequences with large trees, without padding (`worker.device.state`).
    """
    if drafts:
        return config.max_num_seqs * MAX_NEW_DRAFT_TOKENS
    of_chains = config.max_num_seqs * (1 + _num_draft_tokens(config))
    of_trees = config.max_num_seqs * (1 + _num_tree_nodes(config))
    return max(of_chains, min(of_trees, MAX_GRAPH_TOKENS))
